"""A generation: prompts to shards, shards to calls, what a cut has left to the tail, samples to whoever follows.

In the deterministic mode the samples are put into their canonical order before the next stage sees them: the one place
where tensors pass through the orchestrator.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from functions.base.samples import SampleBatch
from functions.base.wire import CACHES, CALLS, Call, Ref
from orchestrator.base.canonical import canonical
from orchestrator.base.errors import RunError
from orchestrator.job.environment_config import environment_of
from orchestrator.job.prompts import PromptSet
from orchestrator.job.sections import RolloutConfig
from orchestrator.step.context import Context
from orchestrator.step.dataflow import Finished, Samples, lengths_of
from orchestrator.step.episodes import Episodes
from orchestrator.step.plan_clock import PlanClock
from orchestrator.step.rollout import Rollout, Shard, deal, regroup

KEEP_FROM = 512
"""Tokens from which on a sample's keys and values move with it, until the planner knows what both ways cost."""
HANDED_ON_S = 0.2
"""After which turns that have ended are handed on with the next, however few: their tools wait."""
ORDERED_BATCH = 64
"""Samples per batch in the deterministic mode: a constant, so that what a function sees depends on the job alone."""


@dataclass(frozen=True)
class Generation:
    """`n` samples of each of `prompts`."""

    context: Context
    name: str
    prompts: PromptSet
    n: int
    planned: bool
    """Whether it is the one that the step's plan is for: with its shards, its cut and its tail. The plan knows nothing
    of any other: its prompts are dealt to the replicas in turn, and what one that is told to stop hands over goes on
    at the others. The same number of prompts and of samples does not make a generation the planned one.
    """
    temperature: float | None = None
    """Instead of the job's."""
    clock: PlanClock = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "clock", self.context.clock if self.planned else PlanClock(0.0, None))

    async def run(self, samples: Samples) -> None:
        """Puts them into `samples` as they finish. Raises RunError for samples that never come back."""
        context, plan, weights = self.context, self.context.plan, {"policy": self.context.versions["actor"]}
        whole = SampleBatch.of_prompts(
            self.prompts.tokens, samples_per_prompt=self.n, version=weights["policy"].number,
            first_group=self.prompts.first_group,
        )  # fmt: skip
        replicas, sampling = context.replicas("generate"), self._sampling()
        shards = plan.shards if self.planned else deal(len(self.prompts.tokens), self.n, replicas)
        refs = [await context.put(whole.select(shard).encode()) for shard in shards if len(shard)]

        def call(function: str, shard: Shard) -> Call:
            return context.call(function, "generate", shard.inputs, weights, sampling)

        kept = Samples() if context.job.deterministic else samples
        kept.environment = samples.environment
        if context.job.environment is not None:
            done = await self._episodes(call, [whole.select(shard) for shard in shards if len(shard)], refs, kept)
            await self._end(whole, done, kept, samples)
            return
        rollout = Rollout(
            call,
            context.store,
            caches=f"{CACHES}s{context.number:06d}.",
            unfinished=len(whole),
            cut_below=plan.cut_below if self.planned else 0,
            migrate_to=plan.migrate_to,
            tail_function=self.planned and plan.tail != "generate",
            scaled=self.clock.scaled,
        )
        try:
            async with context.fleet.stage("generate", replicas) as stage:
                leftovers = await rollout.run(stage, [Shard([ref]) for ref in refs], kept)
                if leftovers and not rollout.tail_function:
                    await rollout.run(stage, regroup(leftovers, plan.migrate_to), kept)
                context.account(self.name, stage)
            if rollout.tail_function:
                await self._generate_tail(rollout, leftovers, kept)
        except BaseException:
            await rollout.free()
            raise
        context.tasks.create_task(rollout.free())
        if leftovers:
            moved = sum(call.stats.get("moved_tokens", 0.0) for call in context.report.calls)
            migrated = float(sum(len(item.group) for item in leftovers))
            context.report.observed |= {"rollout/migrated": migrated, "rollout/moved_tokens": moved}
        await self._end(whole, rollout, kept, samples)

    async def _end(self, whole: SampleBatch, rollout: Rollout | Episodes, kept: Samples, samples: Samples) -> None:
        """All samples are there: put into order, where that is wanted, and reported."""
        if rollout.unfinished:
            raise RunError(f"step {self.context.number}: {rollout.unfinished} samples never came back from generate")
        if kept is not samples:
            kept.end()
            await self._put_in_order(kept, samples)
        self._report(whole, rollout)

    async def _episodes(
        self, generate: Callable[[str, Shard], Call], shards: Sequence[SampleBatch], refs: Sequence[Ref], kept: Samples
    ) -> Episodes:
        """Samples that an environment answers until they are over."""
        context, config = self.context, self.context.job.environment
        assert config is not None, "the job has one"
        rows = await context.put(canonical(dict(zip(map(str, self.prompts.groups), self.prompts.rows, strict=True))))
        reward = context.job.reward
        params = {
            "kinds": dict(config.kinds), "episodes": f"{CALLS}s{context.number:06d}.episodes/{self.name}/",
            "max_turns": config.max_turns, "max_response_length": context.job.rollout.max_response_length,
            "timeout_s": config.timeout_s, "concurrency": config.concurrency, "seed": context.seed(self.name),
            "score": reward.score == "environment", "on_error": reward.on_error,
        }  # fmt: skip
        if asked := self.prompts.asked:
            params["max_prompt_length"] = asked
        if kwargs := context.job.data.chat_template_kwargs:
            params["template"] = dict(kwargs)
        weights = {"policy": context.versions["actor"]}

        def act(samples: Sequence[Ref]) -> Call:
            return context.call("environment", "act", {"samples": samples, "rows": [rows]}, weights, params)

        episodes = Episodes(
            lambda shard: generate("generate", shard), act, context.store, f"{CACHES}s{context.number:06d}.",
            sum(map(len, shards)), config.concurrency, context.plan,
            {g: (len(tokens), environment_of(row, config))
             for g, tokens, row in zip(self.prompts.groups, self.prompts.tokens, self.prompts.rows, strict=True)},
            self.clock.scaled,
        )  # fmt: skip
        parts = [
            Finished(ref, part.group.tolist(), part.index.tolist(), part.responses.lengths.tolist())
            for ref, part in zip(refs, shards, strict=True)
        ]
        try:
            async with (
                context.fleet.stage("generate", max(1, len(parts))) as generating,
                context.fleet.stage("environment", context.replicas("environment")) as acting,
            ):
                await episodes.run(generating, acting, parts, kept, ask=bool(self.prompts.asked))
                context.account(self.name, generating)
                context.account("environment" if self.planned else f"{self.name}_environment", acting)
        except BaseException:
            await episodes.free()
            raise
        finally:
            kept.environment.end()  # of a failure, whoever follows hears by the samples
        context.tasks.create_task(episodes.free())
        context.report.texts += episodes.texts
        context.report.failed += episodes.failed
        if self.planned:
            context.report.observed |= episodes.metrics()
            context.report.waits = episodes.waits
        return episodes

    def _sampling(self) -> Mapping[str, Any]:
        job, plan = self.context.job, self.context.plan
        sampling = job.rollout.model_dump(include={"temperature", "top_p", "top_k", "max_response_length"})
        plain = RolloutConfig()  # what a job does not say is not said: a call's id is made of its params
        for key in ("min_p", "repetition_penalty", "stop", "stop_token_ids"):
            if (value := getattr(job.rollout, key)) != getattr(plain, key):
                sampling[key] = value
        if banned := self.context.execution.settings["actor"].banned:
            sampling["banned"] = banned
        if self.temperature is not None:
            sampling["temperature"] = self.temperature
        elif job.train.router_replay != "disabled":  # what has a temperature of its own is not trained on
            sampling["routed_experts"] = True
        seed = self.context.seed(self.name)
        keep_from = KEEP_FROM if plan.resume is None else plan.resume.keep_from
        keep = {} if job.environment is None or keep_from is None else {"keep_from": keep_from}
        if job.environment is not None:
            sampling["chunk_s"] = HANDED_ON_S
        return sampling | {"seed": seed, "chunk": plan.chunk, "cut_parts": max(1, plan.migrate_to)} | keep

    async def _generate_tail(self, rollout: Rollout, leftovers: Sequence[Finished], samples: Samples) -> None:
        """What a cut has left, on the tail's own function; with nothing left its replicas are not waited for."""
        plan, fleet = self.context.plan, self.context.fleet
        if not leftovers:
            await fleet.not_needed(plan.tail)
            return
        async with fleet.stage(plan.tail, plan.migrate_to) as stage:
            await rollout.run(stage, regroup(leftovers, plan.migrate_to), samples)
            self.context.account(self.name, stage)

    async def _put_in_order(self, kept: Samples, samples: Samples) -> None:
        parts = [SampleBatch.decode(await self.context.store.get(ref)) for ref in await kept.refs()]
        whole = SampleBatch.concat(parts).in_order()
        for start in range(0, len(whole), ORDERED_BATCH):
            part = whole.select(range(start, min(start + ORDERED_BATCH, len(whole))))
            ref = await self.context.put(part.encode())
            samples.put(Finished(ref, part.group.tolist(), part.index.tolist(), part.responses.lengths.tolist()))

    def _report(self, whole: SampleBatch, rollout: Rollout | Episodes) -> None:
        report = self.context.report
        self.clock.scaled.set()
        self.clock.generated.set()
        if self.planned:
            report.lengths = lengths_of(rollout.finished)
        report.tokens += int(whole.prompts.lengths[whole.prompt].sum()) + rollout.response_tokens
