"""What functions say about samples, as columns: scores, log-probabilities, values; in micro-batches, as they come."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from functions.base.samples import Columns
from functions.base.wire import Call, Event, Json, Ref
from orchestrator.base.canonical import canonical
from orchestrator.calls.fleet import Stage
from orchestrator.job.prompts import PromptSet
from orchestrator.step.context import Context
from orchestrator.step.dataflow import Samples, Scores, grouped, last, micro_batches
from orchestrator.step.slots import start_s


@dataclass(frozen=True)
class Scoring:
    """One function's columns of the samples of one generation."""

    context: Context
    name: str
    function: str
    operation: str
    params: Json
    weights: Mapping[str, str]
    """The model that each role of the call's weights is played by."""
    rows: PromptSet | None = None
    """What the data set says of the prompts, where the function wants it."""

    async def run(self, samples: Samples, scores: Scores) -> None:
        """Puts the `done` of each call into `scores`."""
        context = self.context
        versions = {role: context.versions[model] for role, model in self.weights.items()}
        inputs: dict[str, Sequence[Ref]] = {}
        if self.rows is not None:
            rows = dict(zip(map(str, self.rows.groups), self.rows.rows, strict=True))
            inputs["rows"] = [await context.put(canonical(rows))]
        size, wait = context.plan.micro_batch, not context.plan.overlap
        if context.job.deterministic:  # in the order and the parts in which they come
            size, wait = 1, False
        async with context.fleet.stage(self.function, context.replicas(self.function)) as stage:
            stage.more = context.job.environment is None  # else the next samples may be long in coming
            async with asyncio.TaskGroup() as calls:
                async for batch in micro_batches(samples, size, wait=wait):
                    part = inputs | {"samples": [item.ref for item in batch]}
                    call = context.call(self.function, self.operation, part, versions, self.params)
                    calls.create_task(self._one(stage, call, [g for item in batch for g in item.group], scores))
                    await asyncio.sleep(0)
                await stage.no_more()
            context.account(self.name, stage)

    async def _one(self, stage: Stage, call: Call, groups: Sequence[int], scores: Scores) -> None:
        stage.at_least += self.context.job.environment is not None
        done = await last(stage.call(call))
        if self.context.job.environment is not None:
            self.context.tasks.create_task(self._stay(stage))
        scores.put(replace(done, data={**done.data, "group": groups}))
        if "texts" in done.data:
            self.context.report.texts.append(Ref.from_json(done.data["texts"]))
        self.context.report.failed += done.data.get("failed", [])

    async def _stay(self, stage: Stage) -> None:
        """The replica of a call that has ended waits for another one as long as it would take to start (slots.py); the
        only one to the end, where training that streams may take its room and would wait for it."""
        only = self.context.plan.stream_s and stage.at_least == 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if only else start_s(stage)):
                await stage.ended.wait()
        stage.at_least -= 1
        await stage.fleet.settle(stage.function)


async def read_column(
    context: Context, name: str, samples: Samples, columns: Sequence[Scores]
) -> dict[int, list[float]]:
    """A per-sample column by group, in the order of the samples' index; when all of them are there."""
    await samples.all()
    parts = [Columns.decode(await context.store.get(ref)) for scores in columns for ref in await scores.refs()]
    return grouped(
        (*key, value)
        for part in parts
        if name in part.sample
        for key, value in zip(part.keys, part.sample[name].tolist(), strict=True)
    )


async def put_baselines(
    context: Context, column: str, samples: Samples, greedy: Samples, scores: Scores, baselines: Scores
) -> None:
    """Each sample's prompt's greedy score, as the samples' own column `column`, into `baselines`."""
    found = await read_column(context, "score", greedy, [scores])
    for item in await samples.all():
        values = np.array([found[group][0] for group in item.group], np.float32)
        group, index, lengths = (np.array(x, np.int32) for x in (item.group, item.index, item.length))
        ref = await context.put(Columns(group, index, lengths, sample={column: values}).encode())
        baselines.put(Event("done", ref, {"group": list(item.group)}))
