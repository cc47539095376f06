"""One step's dataflow: what a recipe is written in.

    samples = step.generate()            a stream that grows while replicas generate
    scores = step.reward(samples)        starts on the first finished samples (sample-level fusion)
    reference = step.logprobs(samples)   beside it
    step.train("actor", samples, scores, reference)     when all have ended, or streamed: whole groups as they come

Every operation starts at once in a task of its own and returns a stream; whoever needs its results follows it. All
tasks are supervised: the first failure ends the step. Only references pass through here, never tensors; the one
exception is the deterministic mode, which puts the samples into their canonical order before the next stage sees them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from functions.base.samples import Columns, SampleBatch
from functions.base.wire import CACHES, Call, Event, Json, Ref, Version
from functions.exchange.base import checksum
from functions.train.params import TrainParams
from orchestrator.base.canonical import canonical
from orchestrator.base.errors import RunError
from orchestrator.base.stream import Stream
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.calls.fleet import Fleet, Stage
from orchestrator.job.prompts import PromptSet
from orchestrator.planner.base import StepPlan
from orchestrator.step.dataflow import (
    Finished,
    Report,
    Samples,
    Scores,
    Span,
    grouped,
    last,
    lengths_of,
    micro_batches,
)
from orchestrator.step.feed import Feeder
from orchestrator.step.plan_clock import PlanClock
from orchestrator.step.preload import penalty_models
from orchestrator.step.rollout import Rollout, Shard, deal, regroup

ORDERED_BATCH = 64
"""Samples per batch in the deterministic mode: a constant, so that what a function sees depends on the job alone."""


@dataclass
class Step:
    """Step `number` of a job, while it runs. `versions` are those it began with: all of its stages see the same."""

    number: int
    epoch: int
    seed: int
    prompts: PromptSet
    plan: StepPlan
    versions: dict[str, Version]
    settings: Mapping[str, Any]
    """What `train` passes on: the recipe's choices, and the job's over them (orchestrator/recipes/settings.py)."""
    optimizers: Mapping[str, Any]
    """Optimizer settings of models that have their own."""
    options: Mapping[str, Any]
    """The recipe's options, and the job's over them."""
    sampling: Mapping[str, Any]
    samples_per_prompt: int
    scorer: Mapping[str, Any]
    deterministic: bool
    fleet: Fleet
    store: AsyncExchange
    tasks: asyncio.TaskGroup
    call_s: float
    lifetime_s: float
    draw: Callable[[], PromptSet]
    plan_clock: PlanClock = field(default_factory=lambda: PlanClock(0.0, None))
    placed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the planned generation asks for no more replicas, its tail's included."""
    trained: dict[str, Version] = field(default_factory=dict)
    """The versions that this step's train calls have published."""
    report: Report = field(default_factory=Report)

    def generate(
        self, prompts: PromptSet | None = None, *, n: int | None = None, temperature: float | None = None,
        name: str = "gen",
    ) -> Samples:  # fmt: skip
        """`n` samples of each prompt (default: the job's) at `temperature` (0: greedy)."""
        count = self.samples_per_prompt if n is None else n
        samples = Samples((prompts or self.prompts).groups, count)
        sampling = dict(self.sampling) | ({} if temperature is None else {"temperature": temperature})
        sampling |= {"seed": derived_seed(self.seed, self.number, name), "chunk": self.plan.chunk}
        sampling |= {"cut_parts": max(1, self.plan.migrate_to)}
        self._fill(samples, self._generate(name, samples, prompts or self.prompts, count, sampling))
        return samples

    def reward(self, samples: Samples, prompts: PromptSet | None = None, *, name: str = "reward") -> Scores:
        """The scorer's columns ("score" and whatever else it returns) for each sample."""
        return self._columns(
            samples, name, "reward", "score", dict(self.scorer),
            weights={"policy": "actor"} | ({"model": "reward"} if "reward" in self.versions else {}),
            rows=prompts or self.prompts,
        )  # fmt: skip

    def reference(self, samples: Samples) -> list[Scores]:
        """What a KL penalty wants, where the job has one: log-probabilities of the sampled tokens (penalty_models)."""
        names = {"reference": ("ref_logprobs", "ref"), "actor": ("old_logprobs", "old_log_prob")}
        models = penalty_models(self.settings, self.versions)
        return [self.logprobs(samples, model=m, column=names[m][0], name=names[m][1]) for m in models]

    def logprobs(
        self, samples: Samples, *, model: str = "reference", column: str = "ref_logprobs", name: str = "ref"
    ) -> Scores:
        """A model's log-probabilities of the sampled tokens, by the reference function."""
        params = {"temperature": self.settings["temperature"], "column": column}
        return self._columns(samples, name, "reference", "logprobs", params, weights={"model": model})

    def values(self, samples: Samples, *, model: str = "critic", column: str = "values") -> Scores:
        """The critic's values of the sampled tokens."""
        return self._columns(samples, column, model, "values", {"column": column}, weights={"model": model})

    def train(
        self, model: str, samples: Samples | Sequence[Samples], *columns: Scores,
        only: Collection[int] | None = None, **settings: Any,
    ) -> asyncio.Task[Json]:  # fmt: skip
        """One train call: publishes the next version of `model` and makes it current when the step ends.

        `only`: the groups to train on (default: all). `settings` go over the recipe's for this call.
        """
        rollouts = [samples] if isinstance(samples, Samples) else list(samples)
        return self.tasks.create_task(self._train(model, rollouts, columns, only, settings))

    def more_prompts(self) -> PromptSet:
        """As many further prompts as the step has, numbered on from them (dynamic sampling)."""
        return self.draw()

    def of_greedy(self, column: str, samples: Samples, greedy: Samples, scores: Scores) -> Scores:
        """Each sample's prompt's greedy score, as the samples' own column `column` (ReMax's baseline)."""
        columns = Scores()

        async def run() -> None:
            baselines = await self.column("score", greedy, scores)
            for item in await samples.all():
                values = np.array([baselines[group][0] for group in item.group], np.float32)
                group, index, lengths = (np.array(x, np.int32) for x in (item.group, item.index, item.length))
                ref = await self._put(Columns(group, index, lengths, sample={column: values}).encode())
                columns.put(Event("done", ref, {"group": list(item.group)}))

        self._fill(columns, run())
        return columns

    async def column(self, name: str, samples: Samples, *columns: Scores) -> dict[int, list[float]]:
        """A per-sample column, by group: for recipes that decide on it (dynamic sampling, validation)."""
        await samples.all()
        parts = [Columns.decode(await self.store.get(ref)) for scores in columns for ref in await scores.refs()]
        return grouped(
            (int(g), int(i), float(v))
            for part in parts
            if name in part.sample
            for g, i, v in zip(part.group, part.index, part.sample[name], strict=True)
        )

    # --- how -----------------------------------------------------------------------------------------------------

    def _fill(self, stream: Stream[Any], work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` as a supervised task that fills `stream`; its end or failure ends the stream."""

        async def run() -> None:
            try:
                await work
            except BaseException as error:
                stream.end(error)
                raise
            stream.end()

        self.tasks.create_task(run())

    def _account(self, name: str, stage: Stage) -> None:
        self.report.calls += stage.observations
        if stage.began_s is not None:
            now_s = asyncio.get_running_loop().time()
            self.report.spans.append(Span(name, stage.function, stage.began_s, now_s))

    def _call(self, function: str, operation: str, inputs: Mapping[str, Sequence[Ref]], weights: Mapping[str, Version],
              params: Mapping[str, Any]) -> Call:  # fmt: skip
        """The call's id names its content: the same work in a resumed run has the same id, and finds its result."""
        call = Call(
            id="", operation=operation, inputs=inputs, weights=weights, params=params,
            step=self.number, epoch=self.epoch, deadline_s=self.call_s,
        )  # fmt: skip
        content = canonical(call.to_json() | {"epoch": 0})
        identity = f"s{self.number:06d}.{function}.{checksum(content)[:16]}"
        return Call(identity, operation, inputs, weights, params, self.number, self.epoch, self.call_s)

    async def _put(self, data: bytes) -> Ref:
        key = f"batches/s{self.number:06d}/{checksum(data)[:24]}"
        return await self.store.put(key, data, lifetime_s=self.lifetime_s)

    async def _generate(
        self, name: str, samples: Samples, prompts: PromptSet, n: int, sampling: Mapping[str, Any]
    ) -> None:
        whole = SampleBatch.of_prompts(
            prompts.tokens, samples_per_prompt=n, version=self.versions["actor"].number, first_group=prompts.first_group
        )
        planned = prompts is self.prompts and n == self.samples_per_prompt
        replicas = max(1, self.plan.replicas["generate"])
        shards = self.plan.shards if planned else deal(len(prompts.tokens), n, replicas)
        refs = [await self._put(whole.select(shard).encode()) for shard in shards if len(shard)]
        weights = {"policy": self.versions["actor"]}
        rollout = Rollout(
            call=lambda function, shard: self._call(function, "generate", shard.inputs, weights, sampling),
            store=self.store,
            caches=f"{CACHES}s{self.number:06d}.",
            unfinished=len(whole),
            cut_below=self.plan.cut_below if planned else 0,
            migrate_to=self.plan.migrate_to,
            elsewhere=self.plan.tail != "generate",
            placed=self.placed if planned else asyncio.Event(),
        )
        kept = Samples() if self.deterministic else samples
        try:
            async with self.fleet.stage("generate", replicas) as stage:
                leftovers = await rollout.run(stage, [Shard([ref]) for ref in refs], kept)
                if leftovers and not rollout.elsewhere:
                    await rollout.run(stage, regroup(leftovers, self.plan.migrate_to), kept)
                self._account(name, stage)
            if rollout.elsewhere and planned:
                await self._generate_tail(name, rollout, leftovers, kept)
        except BaseException:
            await rollout.free()
            raise
        self.tasks.create_task(rollout.free())
        if leftovers:
            moved = sum(call.stats.get("moved_tokens", 0.0) for call in self.report.calls)
            migrated = float(sum(len(item.group) for item in leftovers))
            self.report.observed |= {"rollout/migrated": migrated, "rollout/moved_tokens": moved}
        if rollout.unfinished:
            raise RunError(f"step {self.number}: {rollout.unfinished} samples never came back from generate")
        if self.deterministic:
            kept.end()
            await self._put_in_order(kept, samples)
        if planned:
            self.placed.set()
            self.plan_clock.generated.set()
            self.report.lengths = lengths_of(rollout.finished)
        self.report.tokens += int(whole.prompts.lengths[whole.prompt].sum()) + rollout.response_tokens

    async def _generate_tail(
        self, name: str, rollout: Rollout, leftovers: Sequence[Finished], samples: Samples
    ) -> None:
        """What a cut has left, on the tail's own function; with nothing left its replicas are not waited for."""
        if not leftovers:
            await self.fleet.not_needed(self.plan.tail)
            return
        async with self.fleet.stage(self.plan.tail, self.plan.migrate_to) as stage:
            await rollout.run(stage, regroup(leftovers, self.plan.migrate_to), samples)
            self._account(name, stage)

    async def _put_in_order(self, kept: Samples, samples: Samples) -> None:
        parts = [SampleBatch.decode(await self.store.get(ref)) for ref in await kept.refs()]
        whole = SampleBatch.concat(parts).in_order()
        for start in range(0, len(whole), ORDERED_BATCH):
            part = whole.select(range(start, min(start + ORDERED_BATCH, len(whole))))
            ref = await self._put(part.encode())
            samples.put(Finished(ref, part.group.tolist(), part.index.tolist(), part.responses.lengths.tolist()))

    def _columns(
        self, samples: Samples, name: str, function: str, operation: str, params: Json, *,
        weights: Mapping[str, str], rows: PromptSet | None = None,
    ) -> Scores:  # fmt: skip
        scores = Scores()

        async def run() -> None:
            versions = {role: self.versions[model] for role, model in weights.items()}
            inputs: dict[str, Sequence[Ref]] = {}
            if rows is not None:
                inputs["rows"] = [await self._put(canonical(dict(zip(map(str, rows.groups), rows.rows, strict=True))))]
            async with self.fleet.stage(function, max(1, self.plan.replicas[function])) as stage:
                size, wait = self.plan.micro_batch, not self.plan.overlap
                if self.deterministic:  # in the order and the parts in which they come
                    size, wait = 1, False
                async with asyncio.TaskGroup() as calls:
                    async for batch in micro_batches(samples, size, wait=wait):
                        part = inputs | {"samples": [item.ref for item in batch]}
                        call = self._call(function, operation, part, versions, params)
                        calls.create_task(one(stage, call, [group for item in batch for group in item.group]))
                        await asyncio.sleep(0)
                    await stage.no_more()
                self._account(name, stage)

        async def one(stage: Stage, call: Call, groups: Sequence[int]) -> None:
            done = await last(stage.call(call))
            scores.put(replace(done, data={**done.data, "group": groups}))
            if "texts" in done.data:
                self.report.texts.append(Ref.from_json(done.data["texts"]))
            self.report.failed += done.data.get("failed", [])

        self._fill(scores, run())
        return scores

    async def _train(
        self, model: str, rollouts: Sequence[Samples], columns: Sequence[Scores], only: Collection[int] | None,
        settings: Mapping[str, Any],
    ) -> Json:  # fmt: skip
        function = "train" if model == "actor" else f"train-{model}"
        params = {
            **self.settings,
            "objective": "policy" if model == "actor" else "value",
            "optimizer": self.optimizers.get(model, self.settings["optimizer"]),
            **settings,
            "model": model,
        }

        async def whole() -> Call:
            """The call that has all samples and columns as inputs, when they are there."""
            inputs = {
                "samples": [ref for samples in rollouts for ref in await samples.refs()],
                "columns": [ref for scores in columns for ref in await scores.refs()],
            }
            dropped = {"dropped": _dropped(rollouts, columns, only)}
            return self._call(function, "train", inputs, {"policy": self.versions[model]}, params | dropped)

        streamed = function in self.plan.stream_s and only is None and len(rollouts) == 1
        async with self.fleet.stage(function, max(1, self.plan.replicas[function])) as stage:
            if streamed:
                stream = not self.deterministic and TrainParams.from_json(params).streams
                done = await self._fed(stage, model, params, rollouts[0], columns, whole, stream)
            else:
                done = await _answer(stage, await whole())
            self._account(f"update_{model}", stage)
        self.report.metrics |= done.data["metrics"]
        if "fed_batches" in done.data["stats"]:
            self.report.observed[f"rollout/fed_batches/{function}"] = float(done.data["stats"]["fed_batches"])
        if "mismatch" in done.data:
            self.report.mismatch = Ref.from_json(done.data["mismatch"])
        self.trained[model] = Version.from_json(done.data["version"])
        return dict(done.data)

    async def _fed(
        self, stage: Stage, model: str, params: Json, samples: Samples, columns: Sequence[Scores],
        whole: Callable[[], Awaitable[Call]], stream: bool,
    ) -> Event:  # fmt: skip
        """The `done` of a call that starts while generation goes on, when the plan says. Without `stream` it only loads
        what it needs, and trains when the last part has come.
        """
        prefix = f"calls/s{self.number:06d}.{stage.function}.{model}.e{self.epoch}.feed/"
        feeder = Feeder(
            self.store, prefix, samples, columns, part=self.plan.stream_part, lifetime_s=self.lifetime_s
        )  # fmt: skip

        async def identity() -> str:
            return (await whole()).id

        async with asyncio.TaskGroup() as tasks:
            feeding = tasks.create_task(feeder.run(identity))
            groups = None if self.deterministic else self.plan.stream_groups.get(stage.function)
            planned_s = self.plan.stream_s[stage.function]
            due = [tasks.create_task(self._due(planned_s, groups is not None))]
            due += [tasks.create_task(feeder.reached(groups))] if groups is not None else []
            await asyncio.wait([feeding, *due], return_when=asyncio.FIRST_COMPLETED)
            for waiting in due:
                waiting.cancel()
            weights = {"policy": self.versions[model]}
            fed = {**params, "feed": {"prefix": prefix, "stream": stream}}
            return await _answer(stage, self._call(stage.function, "train", {}, weights, fed))

    async def _due(self, planned_s: float, behind: bool) -> None:
        """Returns at the planned time; `behind`: not before generation has, or waits in front of all others for, the
        room that it needs."""
        await self.plan_clock.reach(planned_s)
        if behind:
            await self.placed.wait()


async def _answer(stage: Stage, call: Call) -> Event:
    """The `done` of a train call, made by all of the stage's replicas together."""
    return await (last(stage.call(call)) if stage.replicas == 1 else stage.gang(call))


def _dropped(
    rollouts: Sequence[Samples], columns: Sequence[Scores], only: Collection[int] | None
) -> list[tuple[int, int]]:
    """(group, index) of the samples that are not trained on: without a score, or of groups that are not wanted."""
    failed = {(f["group"], f["index"]) for scores in columns for e in scores.items for f in e.data.get("failed", ())}
    unwanted = {
        (group, index)
        for samples in rollouts
        for item in samples.items
        for group, index in zip(item.group, item.index, strict=True)
        if only is not None and group not in only
    }
    return sorted(failed | unwanted)


def derived_seed(seed: int, step: int, purpose: str) -> int:
    """A 63-bit seed of its own for each job, step and purpose."""
    return int(checksum(f"{seed}/{step}/{purpose}".encode())[:16], 16) >> 1
