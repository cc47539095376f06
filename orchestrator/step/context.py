"""What a step knows while it runs, and what all of its stages do with that: make calls, put data, fill streams."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from functions.base.wire import Call, Ref, Version
from functions.call.train_params import TrainParams
from functions.exchange.base import checksum
from orchestrator.base.canonical import canonical
from orchestrator.base.stream import Stream
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.calls.fleet import Fleet, Stage
from orchestrator.job.config import JobConfig
from orchestrator.job.prompts import PromptSet
from orchestrator.planner.base import StepPlan
from orchestrator.step.dataflow import StageTime, StepReport
from orchestrator.step.plan_clock import PlanClock


@dataclass(frozen=True)
class Execution:
    """What is the same in all steps that one execution of a job makes."""

    job: JobConfig
    settings: Mapping[str, TrainParams]
    """What train calls get, by model: the recipe's choices, and the job's over them (recipes/settings.py)."""
    options: Mapping[str, Any]
    """The recipe's options, and the job's over them."""
    state_every: int
    """Of checkpoints; 1 in an execution that has lost a node."""
    epoch: int
    """Of the lease, in every call: functions refuse what an orchestrator before this one still asks for."""
    store: AsyncExchange
    fleet: Fleet


@dataclass(frozen=True)
class Context:
    """Step `number`. `versions` are those it began with: all of its stages see the same."""

    execution: Execution
    number: int
    prompts: PromptSet
    """The batch that the plan is for; empty where nothing is planned, as in validation."""
    plan: StepPlan
    versions: Mapping[str, Version]
    clock: PlanClock
    tasks: asyncio.TaskGroup
    """Of the step: the first failure in it ends them all."""
    again: int = 0
    """How often this execution has begun the step before, and lost values of it (run/lost.py)."""
    report: StepReport = field(default_factory=StepReport)
    """Where its stages write what they leave behind."""

    @property
    def job(self) -> JobConfig:
        return self.execution.job

    @property
    def store(self) -> AsyncExchange:
        return self.execution.store

    @property
    def fleet(self) -> Fleet:
        return self.execution.fleet

    def replicas(self, function: str) -> int:
        """As planned; at least one."""
        return max(1, self.plan.replicas[function])

    def seed(self, purpose: str) -> int:
        """A 63-bit seed of its own for each job, step and purpose."""
        return int(checksum(f"{self.job.seed}/{self.number}/{purpose}".encode())[:16], 16) >> 1

    def fill(self, stream: Stream[Any], work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` as a supervised task that fills `stream`; its end or failure ends the stream."""

        async def run() -> None:
            try:
                await work
            except BaseException as error:
                stream.end(error)
                raise
            stream.end()

        self.tasks.create_task(run())

    def call(
        self, function: str, operation: str, inputs: Mapping[str, Sequence[Ref]], weights: Mapping[str, Version],
        params: Mapping[str, Any],
    ) -> Call:  # fmt: skip
        """The call's id names its content: the same work in a resumed run has the same id, and finds its result."""
        call = Call(
            id="", operation=operation, inputs=inputs, weights=weights, params=params,
            step=self.number, epoch=self.execution.epoch, deadline_s=self.job.limits.call_s,
        )  # fmt: skip
        content = canonical(call.to_json() | {"epoch": 0})
        id, profile = f"s{self.number:06d}.{function}.{checksum(content)[:16]}", self.number in self.job.profile.steps
        return replace(call, id=id, profile=profile)

    async def put(self, data: bytes) -> Ref:
        """Data of the step, under a name that its content gives."""
        key = f"batches/s{self.number:06d}/{checksum(data)[:24]}"
        return await self.store.put(key, data, lifetime_s=self.job.exchange.lifetime_s)

    def account(self, name: str, stage: Stage) -> None:
        """A stage is over: its calls and its time go into the report, under verl's name for it."""
        self.report.calls += stage.observations
        if stage.began_s is not None:
            now_s = asyncio.get_running_loop().time()
            self.report.stages.append(StageTime(name, stage.function, stage.began_s, now_s))
