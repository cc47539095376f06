"""One step's dataflow: what a recipe is written in.

    samples = step.generate()            a stream that grows while replicas generate
    scores = step.reward(samples)        starts on the first finished samples (sample-level fusion)
    reference = step.logprobs(samples)   beside it
    step.train("actor", samples, scores, reference)     when all of them have ended

Every operation starts at once in a task of its own and returns a stream; whoever needs its results follows it. All tasks
are supervised: the first failure ends the step. Only references pass through here, never tensors; the one exception is
the deterministic mode, which puts the samples into their canonical order before the next stage sees them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from functions.exchange.base import checksum
from functions.samples import Columns, SampleBatch
from functions.wire import Call, Event, Json, Ref, Version
from orchestrator.errors import CallFailed, RunError
from orchestrator.fleet import Fleet, Stage
from orchestrator.invoke import ask_cut
from orchestrator.journal import canonical
from orchestrator.planner.base import CallObservation, StepPlan
from orchestrator.store import Store
from orchestrator.stream import Stream

ORDERED_BATCH = 64
"""Samples per batch in the deterministic mode: a constant, so that what a function sees depends on the job alone."""


@dataclass(frozen=True)
class Finished:
    """A reference to finished samples, and the little that is decided on."""

    ref: Ref
    group: Sequence[int]
    index: Sequence[int]
    length: Sequence[int]

    @classmethod
    def of(cls, event: Event) -> Finished:
        assert event.ref is not None, "samples and cut events carry a ref"
        return cls(event.ref, event.data["group"], event.data["index"], event.data["length"])


class Samples(Stream[Finished]):
    """Finished samples as they come."""

    async def refs(self) -> list[Ref]:
        return sorted((item.ref for item in await self.all()), key=lambda ref: ref.key)

    async def lengths(self) -> dict[int, list[int]]:
        """Response lengths by group, in the order of the samples' index."""
        found = sorted((g, i, n) for item in await self.all() for g, i, n in zip(item.group, item.index, item.length))
        lengths: dict[int, list[int]] = {}
        for group, _, length in found:
            lengths.setdefault(group, []).append(length)
        return lengths


class Scores(Stream[Event]):
    """`done` events of a stage that says something about samples; their refs are Columns."""

    async def refs(self) -> list[Ref]:
        return sorted((event.ref for event in await self.all() if event.ref is not None), key=lambda ref: ref.key)


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one generation: token ids, and the data set's rows for the scorer. `first_group` numbers them."""

    tokens: Sequence[Sequence[int]]
    rows: Sequence[Json]
    first_group: int = 0

    @property
    def groups(self) -> range:
        return range(self.first_group, self.first_group + len(self.tokens))


@dataclass(frozen=True)
class Span:
    """A stage's time in the step, for metrics and the trace. Event-loop seconds."""

    name: str
    function: str
    start_s: float
    stop_s: float


@dataclass
class Report:
    """What a step leaves behind besides weights."""

    metrics: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    calls: list[CallObservation] = field(default_factory=list)
    texts: list[Ref] = field(default_factory=list)
    failed: list[Json] = field(default_factory=list)
    tokens: int = 0
    """Prompt and response tokens of all samples."""


@dataclass
class Step:
    """Step `number` of a job, while it runs. `versions` holds the newest version of each model; training replaces it."""

    number: int
    epoch: int
    seed: int
    prompts: PromptSet
    plan: StepPlan
    versions: dict[str, Version]
    settings: Mapping[str, Any]
    """What `train` passes on: the recipe's choices, and the job's over them."""
    sampling: Mapping[str, Any]
    samples_per_prompt: int
    scorer: Mapping[str, Any]
    deterministic: bool
    fleet: Fleet
    store: Store
    tasks: asyncio.TaskGroup
    call_s: float
    lifetime_s: float
    report: Report = field(default_factory=Report)

    def generate(
        self, prompts: PromptSet | None = None, *, n: int | None = None, temperature: float | None = None,
        name: str = "gen",
    ) -> Samples:  # fmt: skip
        """`n` samples of each prompt (default: the job's) at `temperature` (0: greedy)."""
        samples = Samples()
        count = self.samples_per_prompt if n is None else n
        sampling = dict(self.sampling) | ({} if temperature is None else {"temperature": temperature})
        sampling["seed"] = derived_seed(self.seed, self.number, name)
        self._follow_with(samples, name, "generate", self._generate(samples, prompts or self.prompts, count, sampling))
        return samples

    def reward(self, samples: Samples, prompts: PromptSet | None = None, *, name: str = "reward") -> Scores:
        """The scorer's columns ("score" and whatever else it returns) for each sample."""
        return self._columns(
            samples, name, "reward", "score", dict(self.scorer),
            weights={"policy": "actor"} | ({"model": "reward"} if "reward" in self.versions else {}),
            rows=prompts or self.prompts,
        )  # fmt: skip

    def logprobs(self, samples: Samples, *, model: str = "reference", name: str = "ref") -> Scores:
        """The reference's log-probabilities of the sampled tokens (column "ref_logprobs")."""
        params = {"temperature": self.sampling["temperature"], "column": "ref_logprobs"}
        return self._columns(samples, name, "reference", "logprobs", params, weights={"model": model})

    def values(self, samples: Samples, *, model: str = "critic", column: str = "values") -> Scores:
        """The critic's values of the sampled tokens."""
        return self._columns(samples, column, model, "values", {"column": column}, weights={"model": model})

    def train(
        self, model: str, samples: Samples, *columns: Scores, groups: Sequence[int] | None = None, **settings: Any
    ) -> asyncio.Task[Json]:
        """One train call: publishes the next version of `model` and makes it current. `groups`: only these prompts."""
        return self.tasks.create_task(self._train(model, samples, columns, groups, settings))

    async def column(self, name: str, samples: Samples, *columns: Scores) -> dict[int, list[float]]:
        """A per-sample column, by group: for recipes that decide on it (dynamic sampling, validation)."""
        await samples.all()
        parts = [Columns.decode(await self.store.get(ref)) for scores in columns for ref in await scores.refs()]
        found = sorted(
            (int(g), int(i), float(v)) for p in parts if name in p.sample for g, i, v in zip(p.group, p.index, p.sample[name])
        )
        values: dict[int, list[float]] = {}
        for group, _, value in found:
            values.setdefault(group, []).append(value)
        return values

    # --- how -----------------------------------------------------------------------------------------------------

    def _follow_with(self, stream: Stream[Any], name: str, function: str, work: Any) -> None:
        """Runs `work` as a supervised task that fills `stream`; its end or failure ends the stream."""

        async def run() -> None:
            clock = asyncio.get_running_loop().time
            start_s = clock()
            try:
                await work
            except BaseException as error:
                stream.end(error)
                raise
            stream.end()
            self.report.spans.append(Span(name, function, start_s, clock()))

        self.tasks.create_task(run())

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

    async def _generate(self, samples: Samples, prompts: PromptSet, n: int, sampling: Mapping[str, Any]) -> None:
        whole = SampleBatch.of_prompts(
            prompts.tokens, samples_per_prompt=n, version=self.versions["actor"].number, first_group=prompts.first_group
        )
        planned = prompts is self.prompts and n == self.samples_per_prompt
        replicas = max(1, self.plan.replicas["generate"])
        shards = self.plan.shards if planned else deal(len(prompts.tokens), n, replicas)
        refs = [await self._put(whole.select(shard).encode()) for shard in shards if len(shard)]
        rollout = Rollout(self, sampling, unfinished=len(whole), cut_below=self.plan.cut_below if planned else 0)
        kept = Samples() if self.deterministic else samples
        async with self.fleet.stage("generate", replicas) as stage:
            leftovers = await rollout.run(stage, [[ref] for ref in refs], kept)
            if leftovers:
                self.report.metrics["rollout/migrated"] = float(sum(len(item.group) for item in leftovers))
                await rollout.run(stage, regroup(leftovers, self.plan.migrate_to), kept)
            self.report.calls += stage.observations
        if rollout.unfinished:
            raise RunError(f"step {self.number}: {rollout.unfinished} samples never came back from generate")
        if self.deterministic:
            kept.end()
            await self._put_in_order(kept, samples)
        self.report.tokens += int(whole.prompts.lengths[whole.prompt].sum()) + rollout.response_tokens

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
                async with asyncio.TaskGroup() as calls:
                    async for batch in micro_batches(samples, 1 if self.deterministic else self.plan.micro_batch):
                        part = inputs | {"samples": [item.ref for item in batch]}
                        calls.create_task(one(stage, self._call(function, operation, part, versions, params)))
                        await asyncio.sleep(0)
                    await stage.no_more()
                self.report.calls += stage.observations

        async def one(stage: Stage, call: Call) -> None:
            done = await last(stage.call(call))
            scores.put(done)
            if "texts" in done.data:
                self.report.texts.append(Ref.from_json(done.data["texts"]))
            self.report.failed += done.data.get("failed", [])

        self._follow_with(scores, name, function, run())
        return scores

    async def _train(
        self, model: str, samples: Samples, columns: Sequence[Scores], groups: Sequence[int] | None, settings: Json
    ) -> Json:
        inputs = {
            "samples": await samples.refs(),
            "columns": [ref for scores in columns for ref in await scores.refs()],
        }
        params = {**self.settings, **settings, "model": model, "step": self.number}
        if groups is not None:
            params["groups"] = list(groups)
        function = "train" if model == "actor" else f"train-{model}"
        clock = asyncio.get_running_loop().time
        start_s = clock()
        async with self.fleet.stage(function, max(1, self.plan.replicas[function])) as stage:
            call = self._call(function, "train", inputs, {"policy": self.versions[model]}, params)
            done = await last(stage.call(call))
            self.report.calls += stage.observations
        self.report.spans.append(Span(f"update_{model}", function, start_s, clock()))
        self.report.metrics |= done.data["metrics"]
        self.versions[model] = Version.from_json(done.data["version"])
        return dict(done.data)


@dataclass
class Rollout:
    """The calls of one generation, and when its tail is cut."""

    step: Step
    sampling: Mapping[str, Any]
    unfinished: int
    cut_below: int
    response_tokens: int = 0
    _cut: bool = False
    _open: list[Call] = field(default_factory=list)

    async def run(self, stage: Stage, shards: Sequence[Sequence[Ref]], samples: Samples) -> list[Finished]:
        """One call a shard, side by side; returns what a cut left unfinished."""
        leftovers: list[Finished] = []
        stage.more, stage.replicas = True, min(stage.replicas, len(shards))
        async with asyncio.TaskGroup() as calls:
            for refs in shards:
                calls.create_task(self._shard(stage, refs, samples, leftovers))
            await asyncio.sleep(0)
            if not self.cut_below or self._cut:
                await stage.no_more()
        return leftovers

    async def _shard(self, stage: Stage, refs: Sequence[Ref], samples: Samples, leftovers: list[Finished]) -> None:
        call = self.step._call(
            "generate", "generate", {"samples": refs}, {"policy": self.step.versions["actor"]}, self.sampling
        )
        self._open.append(call)
        try:
            async for event in stage.call(call):
                if event.kind == "samples":
                    finished = Finished.of(event)
                    self.unfinished -= len(finished.group)
                    self.response_tokens += sum(finished.length)
                    samples.put(finished)
                    await self._cut_tail()
                elif event.kind == "cut" and event.ref is not None:
                    leftovers.append(Finished.of(event))
        finally:
            self._open.remove(call)

    async def _cut_tail(self) -> None:
        """Asks all open calls for their unfinished samples once few enough are left, and there is more than one call."""
        if not self._cut and 0 < self.unfinished <= self.cut_below and len(self._open) > self.step.plan.migrate_to:
            self._cut = True
            for call in self._open:
                await self.step.store.run(lambda call=call: ask_cut(self.step.store.exchange, call))  # type: ignore[misc]


def derived_seed(seed: int, step: int, purpose: str) -> int:
    """A 63-bit seed of its own for each job, step and purpose."""
    return int(checksum(f"{seed}/{step}/{purpose}".encode())[:16], 16) >> 1


def deal(prompts: int, n: int, replicas: int) -> list[list[int]]:
    """Samples of `prompts` prompts to `replicas` shards, a prompt's samples together."""
    return [[row * n + k for row in range(first, prompts, replicas) for k in range(n)] for first in range(replicas)]


def regroup(leftovers: Sequence[Finished], calls: int) -> list[list[Ref]]:
    """Cut shards to `calls` calls, the fullest first to the emptiest call."""
    shards: list[list[Ref]] = [[] for _ in range(min(calls, len(leftovers)))]
    loads = [0] * len(shards)
    for item in sorted(leftovers, key=lambda item: (-len(item.group), item.ref.key)):
        lightest = loads.index(min(loads))
        shards[lightest].append(item.ref)
        loads[lightest] += len(item.group)
    return shards


async def micro_batches(samples: Samples, size: int) -> AsyncIterator[list[Finished]]:
    """Groups of finished items with at least `size` samples each, except the last."""
    batch: list[Finished] = []
    async for item in samples:
        batch.append(item)
        if sum(len(item.group) for item in batch) >= size:
            yield batch
            batch = []
    if batch:
        yield batch


async def last(events: AsyncIterator[Event]) -> Event:
    """The `done` event of a call."""
    found: Event | None = None
    async for event in events:
        found = event
    if found is None or found.kind != "done":
        raise CallFailed("a call ended without its `done` event")
    return found
