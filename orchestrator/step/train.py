"""A train call: when all samples and columns are there, or streamed, while generation goes on.

A streamed call is made when the plan says so, and not before generation has the replicas that it will ask for: it loads
while samples are still to come, and trains on prompt groups as they are whole (streaming.py), or, where the job's
gradients cannot be taken so (TrainParams.streams), once the last part has come.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from functions.base.wire import CALLS, Call, Event, Json, Ref, Version
from functions.call.train_params import TrainParams
from orchestrator.base.errors import RunError
from orchestrator.calls.fleet import Stage
from orchestrator.job.roles import TRAINERS
from orchestrator.step.context import Context
from orchestrator.step.dataflow import Samples, Scores, last
from orchestrator.step.streaming import Streamer


@dataclass(frozen=True)
class Training:
    """One train call of `model`. `only`: the groups to train on (None: all); `settings` go over the recipe's."""

    context: Context
    model: str
    rollouts: Sequence[Samples]
    columns: Sequence[Scores]
    only: Collection[int] | None
    settings: Mapping[str, Any]
    beside: str | None = None
    """Trained in the same call."""

    @property
    def function(self) -> str:
        return TRAINERS[self.model].name

    @property
    def params(self) -> TrainParams:
        context, every = self.context, self.context.execution.state_every
        durable = context.number % every == 0 or context.number == context.job.steps
        return replace(context.execution.settings[self.model].over(self.settings), durable_state=durable)

    @property
    def _said(self) -> list[Scores]:
        """The columns, and what the environment said of the samples, where the job has one."""
        if self.context.job.environment is None:
            return list(self.columns)
        return [*self.columns, *(s.environment for s in self.rollouts if s.environment not in self.columns)]

    async def run(self) -> Json:
        """What the call says of itself; the version that it has published is in the report."""
        context, report = self.context, self.context.report
        streamed = self.function in context.plan.stream_s and self.only is None and len(self.rollouts) == 1
        streamed &= self.beside is None
        ranks = context.job.function(self.function).parallel.mesh.ranks(context.replicas(self.function))
        async with context.fleet.stage(self.function, ranks) as stage:
            done = await (self._streamed(stage) if streamed else self._answer(stage, await self._whole()))
            context.account(f"update_{self.model}", stage)
        both = {self.model: done.data} | ({} if self.beside is None else {self.beside: done.data["beside"]})
        for model, told in both.items():
            report.metrics |= told["metrics"]
            report.durable &= bool(told["durable"])
            report.trained[model] = Version.from_json(told["version"])
        if "fed_batches" in done.data["stats"]:
            report.observed[f"rollout/fed_batches/{self.function}"] = float(done.data["stats"]["fed_batches"])
        report.observed |= {name: float(value) for name, value in done.data["stats"].items() if "/" in name}
        report.observed |= done.data.get("memory", {})
        if "mismatch" in done.data:
            report.mismatch = Ref.from_json(done.data["mismatch"])
        return dict(done.data)

    async def _answer(self, stage: Stage, call: Call) -> Event:
        """The `done` of a train call, made by all of the stage's replicas together."""
        mesh = self.context.job.function(self.function).parallel.mesh
        return await (last(stage.call(call)) if stage.replicas == 1 else stage.gang(call, mesh))

    def _call(self, inputs: Mapping[str, Sequence[Ref]], params: TrainParams, **feed: Json) -> Call:
        weights, more = {"policy": self.context.versions[self.model]}, feed
        if self.beside is not None:
            weights["beside"] = self.context.versions[self.beside]
            settings = self.context.execution.settings[self.beside]
            settings = replace(settings, dropped=params.dropped, durable_state=params.durable_state)
            more = {"beside": settings.to_json()}
        return self.context.call(self.function, "train", inputs, weights, params.to_json() | more)

    async def _whole(self) -> Call:
        """The call that has all samples and columns as inputs, when they are there."""
        inputs = {
            "samples": [ref for samples in self.rollouts for ref in await samples.refs()],
            "columns": [ref for scores in self._said for ref in await scores.refs()],
        }
        return self._call(inputs, replace(self.params, dropped=self._dropped()))

    def _dropped(self) -> tuple[tuple[int, int], ...]:
        """(group, index) of the samples that are not trained on: without a score, or of groups that are not wanted."""
        said = [f for scores in self._said for event in scores.items for f in event.data.get("failed", ())]
        failed = {(f["group"], f["index"]) for f in said}
        keys = [key for samples in self.rollouts for item in samples.items for key in item.keys]
        if failed and failed.issuperset(keys):
            raise RunError(f"step {self.context.number}: no sample has a score; the first says: {said[0]['message']}")
        unwanted = {key for key in keys if self.only is not None and key[0] not in self.only}
        return tuple(sorted(failed | unwanted))

    async def _streamed(self, stage: Stage) -> Event:
        """The `done` of a call that starts while generation goes on."""
        context, plan = self.context, self.context.plan
        deterministic = context.job.deterministic
        name = f"s{context.number:06d}.{self.function}.{self.model}.e{context.execution.epoch}"
        prefix = f"{CALLS}{name}{f'.again{context.again}' if context.again else ''}.feed/"  # a feed never changes
        streamer = Streamer(
            context.store, prefix, self.rollouts[0], self._said,
            part=plan.stream_part, lifetime_s=context.job.exchange.lifetime_s,
        )  # fmt: skip

        async def identity() -> str:
            return (await self._whole()).id

        async with asyncio.TaskGroup() as tasks:
            streaming = tasks.create_task(streamer.run(identity))
            groups = None if deterministic else plan.stream_groups.get(self.function)
            due = tasks.create_task(self._due(streamer, groups))
            await asyncio.wait([streaming, due], return_when=asyncio.FIRST_COMPLETED)
            due.cancel()
            stream = self.params.streams and not deterministic
            return await self._answer(stage, self._call({}, self.params, feed={"prefix": prefix, "stream": stream}))

    async def _due(self, streamer: Streamer, groups: int | None) -> None:
        """Returns at the planned time; with `groups` not before so many are whole, nor before generation has, or waits
        in front of all others for, the room that it needs: where it is slower than planned, ranks would wait."""
        await self.context.clock.reach(self.context.plan.stream_s[self.function])
        if groups is not None:
            await self.context.clock.scaled.wait()
            await streamer.whole(groups)
