"""The loop of a job.

      journal's last record: versions, data cursor
                  |
                  v
   +--> draw prompts --> planner.plan --> the recipe's dataflow (step/)   --> validate --> journal.commit --+
   |                                        generate -+-> reward ----+                                      |
   |                                                  +-> reference -+-> train -> version v+1               |
   |                                                                                                        |
   +---- planner.observe <-- delete what the step no longer needs <-- functions with nothing to do: zero <--+

One step at a time, in one task; a step's stages run side by side in tasks of the step's TaskGroup: the first failure
ends them all, and nothing of the step is committed. A crash anywhere loses at most the step: `resume` finds the last
record, and the results of the calls that had ended. A step whose values the store has lost (Redis emptied) is begun
again at once, and only what is gone is made again (run/lost.py).
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from functions.base.wire import Version, made_in_a_step
from functions.call.train_params import TrainParams
from orchestrator.base.clock import now_s
from orchestrator.base.errors import RunError, StateLost, ValueLost
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.calls.fleet import Fleet
from orchestrator.calls.tracing import Tracing
from orchestrator.job.config import JobConfig
from orchestrator.job.data import Cursor
from orchestrator.job.prompts import Draw, PromptSet, PromptSource
from orchestrator.job.roles import BY_NAME
from orchestrator.planner.base import FunctionLimits, Planner, StepObservation, StepPlan
from orchestrator.recipes.base import Recipe
from orchestrator.recipes.settings import job_models, recipe_options
from orchestrator.run import versions as model_versions
from orchestrator.run.journal import Journal, Record
from orchestrator.run.ledger import Cost
from orchestrator.run.lost import forget_lost
from orchestrator.session.plan_request import plan_request
from orchestrator.session.scores import best_record, check_metric, majority_metrics, stopped_early, validation_metrics
from orchestrator.step.context import Context, Execution
from orchestrator.step.dataflow import StageTime, StepReport
from orchestrator.step.plan_clock import PlanClock
from orchestrator.step.preload import Preload
from orchestrator.step.step import Step
from orchestrator.telemetry.utilization import Utilization
from orchestrator.telemetry.where import where_time_went

LOSSES = 5
"""A step that loses values more often fails."""
ACCURACY_GIVEN = "val-aux/acc_given"
"""1: the scorer says what is right ("acc"); 0: the journal's accuracies are scores, and are not told as accuracies."""


@dataclass(frozen=True)
class StepResult:
    """A committed step, as observers get it."""

    record: Record
    report: StepReport
    plan: StepPlan
    start_s: float
    stop_s: float


@dataclass
class Loop:
    """Runs a job from its last committed step to its end. `cost` tells what the job has cost until now."""

    job: JobConfig
    recipe: Recipe
    prompts: PromptSource
    store: AsyncExchange
    journal: Journal
    fleet: Fleet
    planner: Planner
    epoch: int
    limits: Mapping[str, FunctionLimits]
    settings: Mapping[str, TrainParams]
    """What the train calls of each model get (orchestrator/recipes/settings.py)."""
    state_every: int
    cost: Callable[[], Cost]
    on_plan: Callable[[int, StepPlan], None]
    """Before a step's work begins."""
    on_report: Callable[[int, StepReport], Awaitable[None]]
    """Before a step's commit: what is to be kept of its results, whose calls are deleted after the commit."""
    on_commit: Callable[[StepResult], None]
    execution: Execution = field(init=False)
    preload: Preload = field(init=False)
    utilization: Utilization = field(init=False)

    def __post_init__(self) -> None:
        options = recipe_options(self.job, self.recipe)
        self.execution = Execution(
            self.job, self.settings, options, self.state_every, self.epoch, self.store, self.fleet
        )
        trains = {name: limit.gpus for name, limit in self.limits.items() if BY_NAME[name].kind == "train"}
        self.utilization = Utilization(self.job, trains)
        self.preload = Preload(self.store, self.limits, self.settings["actor"].kl, self.epoch)

    async def run(self) -> None:
        """Steps until the job's last. Raises the first failure, with nothing of the failed step committed."""
        if self.journal.last is None:
            with self.tracing.span("step", {"rlhf.step": 0}):
                await self._until_whole(0, self._commit_start)
        self.prompts.check_unchanged(self.last.history)
        while len(self.journal.records) <= self.job.steps and not self._stopped():
            with self.tracing.span("step", {"rlhf.step": len(self.journal.records)}):
                await self._until_whole(len(self.journal.records), self._step)
        await self.fleet.keep((), lambda _name: 0)

    def _stopped(self) -> bool:
        """Whether validation has been no better for as long as the job waits."""
        patience, best = self.job.validation.patience, self.job.checkpoints.best
        if patience is None or best is None or not stopped_early(self.journal.records, best, patience):
            return False
        self.fleet.invoker.note(f"stopped after step {self.last.step}: {best} was no better in {patience} validations")
        return True

    @property
    def tracing(self) -> Tracing:
        return self.fleet.invoker.tracing

    @property
    def last(self) -> Record:
        last = self.journal.last
        assert last is not None, "step 0 is committed before anything reads it"
        return last

    async def _until_whole(self, number: int, step: Callable[[int, int], Awaitable[None]]) -> None:
        """The step, begun again when values of it are lost; the failure of its last try. `step` gets the number and how
        often it was begun before."""
        for again in range(LOSSES + 1):
            lost: list[ValueLost] = []
            try:
                await step(number, again)
                return
            except* ValueLost as losses:
                if again == LOSSES:
                    raise
                lost += _leaves(losses)
            if gone := next((loss.key for loss in lost if not made_in_a_step(loss.key)), None):
                raise StateLost(self.last.durable, f"step {number}: {gone} is gone")
            calls = await forget_lost(self.store, number)
            self.fleet.invoker.note(
                f"step {number}: begun again, as {lost[0].key} is gone; results of {calls} calls are made again"
            )

    async def _commit_start(self, number: int, again: int) -> None:
        """Step 0: the models that the job starts from, the first validation."""
        start_s, before = now_s(), self.cost()
        versions = await model_versions.import_models(self.store, self.job, job_models(self.recipe, self.settings))
        await self.preload.announce(versions)
        plan = self._plan(PromptSet([], []), 0)
        report = StepReport()
        if self.job.validate_every and self.job.validation.at_start:
            with self.tracing.span("validate"):
                await self._validate(number, again, versions, plan, report)
        with self.tracing.span("commit"):
            await self._commit(versions, Cursor.start(self.job.seed), report, plan, start_s, before)

    async def _step(self, number: int, again: int) -> None:
        start_s, before = now_s(), self.cost()
        await self.preload.announce(self.last.versions)
        draw = Draw(self.prompts, Cursor.from_json(self.last.history["cursor"]), self.job.data.prompts_per_step)
        prompts = draw.next()
        plan, versions = self._plan(prompts, number), self.last.versions
        self.on_plan(number, plan)
        await self.fleet.keep(plan.keep, lambda name: plan.replicas[name])
        async with asyncio.TaskGroup() as prewarming:
            async with asyncio.TaskGroup() as tasks:
                clock = PlanClock(start_s, plan.generated_s)
                context = Context(self.execution, number, prompts, plan, versions, clock, tasks, again)
                starts = [prewarming.create_task(start) for start in self._prewarm(context)]
                await self.recipe.dataflow(Step(context, draw.next))
            for start in starts:
                start.cancel()
        report, versions = context.report, versions | context.report.trained
        await self.preload.announce(versions)
        lengths = {prompts.rows[g]["prompt_id"]: n for g, n in report.lengths.items() if g < len(prompts.rows)}
        step_cost_usd = self.cost().usd - before.usd
        report.observed |= self.planner.observe(
            StepObservation(number, now_s() - start_s, step_cost_usd, lengths, list(report.calls), report.waits)
        )
        if self._validates(number):  # no part of the step that was planned
            with self.tracing.span("validate"):
                await self._validate(number, again, versions, plan, report)
        with self.tracing.span("commit"):
            await self._commit(versions, draw.cursor, report, plan, start_s, before)

    def _prewarm(self, context: Context) -> Iterator[Coroutine[Any, Any, None]]:
        """Starts functions when the plan says so, for this step and for the next, where there is one."""
        plan, last = context.plan, context.number == self.job.steps

        async def start(function: str, planned_s: float, *, next_step: bool) -> None:
            await context.clock.reach(planned_s)
            await self.fleet.prewarm(function, plan.replicas[function], next_step=next_step)

        yield from (start(*planned, next_step=False) for planned in plan.prewarm_s.items())
        if not last:
            yield from (start(*planned, next_step=True) for planned in plan.prewarm_next_s.items())

    def _validates(self, number: int) -> bool:
        every = self.job.validate_every
        return every > 0 and (number % every == 0 or number == self.job.steps)

    def _plan(self, prompts: PromptSet, number: int) -> StepPlan:
        return self.planner.plan(plan_request(self.job, number, prompts, self.limits, self.settings))

    async def _validate(
        self, number: int, again: int, versions: Mapping[str, Version], plan: StepPlan, report: StepReport
    ) -> None:
        """Greedy (or as [validation] says) responses to the held-out prompts, scored by the job's scorer."""
        start_s = now_s()
        held_out, config = self.prompts.validation(), self.job.validation
        async with asyncio.TaskGroup() as tasks:
            nothing, clock = PromptSet([], []), PlanClock(start_s, None)
            context = Context(self.execution, number, nothing, plan, versions, clock, tasks, again)
            step = Step(context, no_more_prompts)
            samples = step.generate(held_out, n=config.n, temperature=config.temperature, name="validate")
            columns = step.reward(samples, held_out, name="validate_reward")
            scores = await step.column("score", samples, columns)
            accuracy = await step.column("acc", samples, columns)
        report.metrics |= validation_metrics(held_out, accuracy or scores, scores, config.n)
        report.observed[ACCURACY_GIVEN] = float(bool(accuracy) or not self.job.steps)
        if not self.job.steps:  # an evaluation: what was answered is all there is
            report.texts += context.report.texts
            texts = [json.loads(line) for ref in report.texts for line in (await self.store.get(ref)).splitlines()]
            report.metrics |= majority_metrics(held_out, texts, config.n)
        if self.job.checkpoints.best is not None:
            check_metric(report.metrics, self.job.checkpoints.best)
        report.calls += context.report.calls
        if self.job.steps:
            report.validation_texts += context.report.texts
        report.stages.append(StageTime("testing", "generate", start_s, now_s()))

    async def _commit(
        self, versions: dict[str, Version], cursor: Cursor, report: StepReport, plan: StepPlan, start_s: float,
        before: Cost,
    ) -> None:  # fmt: skip
        number = len(self.journal.records)
        durable = self._durable(number, versions, report)
        stop_s, cost = now_s(), self.cost()
        learned = {"training/global_step": float(number), "training/epoch": float(cursor.epoch)} | report.metrics
        await self.on_report(number, report)
        record = await self.journal.commit(
            history={
                "weights": await model_versions.digests(self.store, versions),
                "cursor": cursor.to_json(),
                "data": self.prompts.digest,
                "metrics": learned,
            },
            pointers={"versions": {model: version.to_json() for model, version in versions.items()}}
            | ({} if durable == number else {"durable": durable}),
            observed={
                "metrics": observed_metrics(report, cost - before, start_s, stop_s) | self.utilization.of(report.calls),
                "cost_usd": cost.usd,
            },
        )
        self.on_commit(StepResult(record, report, plan, start_s, stop_s))
        records, metric = self.journal.records, self.job.checkpoints.best
        best = best_record(records, metric) if metric is not None else None
        wanted, also = [r.versions for r in records], [records[durable], *([best] if best else ())]
        await model_versions.keep(self.store, wanted, self.job.checkpoints.keep, [r.versions for r in also])
        for prefix in (f"calls/s{number:06d}.", f"batches/s{number:06d}/"):
            await self.store.delete(prefix)

    def _durable(self, number: int, versions: Mapping[str, Version], report: StepReport) -> int:
        """The newest step whose models the store has whole, with the one that is about to be committed."""
        if not number:
            return 0
        before = self.journal.records[self.last.durable].versions
        others = {model: version for model, version in versions.items() if model not in report.trained}
        whole = report.durable and all(before[model] == version for model, version in others.items())
        return number if whole else self.last.durable


def _leaves(group: BaseExceptionGroup[ValueLost]) -> list[ValueLost]:
    return [leaf for e in group.exceptions for leaf in (_leaves(e) if isinstance(e, BaseExceptionGroup) else [e])]


def no_more_prompts() -> PromptSet:
    raise RunError("validation draws no further prompts")


def observed_metrics(report: StepReport, spent: Cost, start_s: float, stop_s: float) -> dict[str, float]:
    """verl's timing_s/*, timing_per_token_ms/* and perf/* of a step.

    perf/throughput is tokens a second and GPU, in verl over all GPUs that the job holds
    (verl/trainer/ppo/metric_utils.py, compute_throughout_metrics: tokens / (time * n_gpus)). Here GPUs come and go: it
    is tokens a GPU-second paid for in the step, which is the same where all are held. Without GPUs, a replica counts as
    one. rollout/tokens_per_s is what a replica of generate makes in a second at work; validations are not counted.
    """
    seconds: dict[str, float] = {}
    for stage in report.stages:
        seconds[stage.name] = seconds.get(stage.name, 0.0) + stage.stop_s - stage.start_s
    metrics = {f"timing_s/{name}": value for name, value in seconds.items()} | {"timing_s/step": stop_s - start_s}
    asked_s = min((stage.start_s for stage in report.stages), default=None)
    metrics |= where_time_went(start_s, stop_s, report.calls, asked_s)
    tested_s = min((stage.start_s for stage in report.stages if stage.name == "testing"), default=stop_s)
    made = [c for c in report.calls if c.operation == "generate" and c.stop_s <= tested_s]
    if made_s := sum(call.work_s for call in made):
        tokens = sum(call.stats.get("decode_tokens", call.response_tokens) for call in made)
        metrics["rollout/tokens_per_s"] = tokens / made_s
    if report.tokens:
        metrics |= {f"timing_per_token_ms/{name}": 1e3 * value / report.tokens for name, value in seconds.items()}
        metrics["perf/total_num_tokens"] = float(report.tokens)
        if device_s := spent.gpu_s or spent.replica_s:
            metrics["perf/throughput"] = report.tokens / device_s
    return metrics | report.observed | {"perf/time_per_step": stop_s - start_s}
