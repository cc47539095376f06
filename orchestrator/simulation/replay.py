"""A run that was made, as a scenario: other policies on the same work.

From the run's trace: the length of every response (content held fixed), and what its calls took (planner/learned.py).
From its job: prompts in their order, functions, replicas, prices. Every function has replicas of its own. Where none
has a GPU, a replica counts as one and what is told are replica-seconds (`Scenario.unit`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from functions.base.wire import Json
from orchestrator.base.errors import RunError
from orchestrator.job.config import JobConfig
from orchestrator.job.functions import function_limits
from orchestrator.job.prompts import PromptSource
from orchestrator.planner.base import FunctionLimits, PastStep
from orchestrator.planner.devices import Device, ModelShape
from orchestrator.planner.latency import GenerateCost, WorkCost
from orchestrator.planner.learned import Priors
from orchestrator.planner.policies import Policy
from orchestrator.platforms.base import FunctionSpec, Usage
from orchestrator.run.directory import RunDirectory
from orchestrator.run.ledger import costs_of, total
from orchestrator.session.history import finished_steps
from orchestrator.session.job_planner import adaptive_planner
from orchestrator.session.session import prepare
from orchestrator.simulation.functions import Generate, Model, Work
from orchestrator.simulation.lengths import LengthTrace
from orchestrator.simulation.scenario import Scenario

KINDS: Mapping[str, Literal["reward", "reference", "train"]] = {
    "reward": "reward", "reference": "reference", "train": "train",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Recorded(Scenario):
    """`costs`: measured, of every function."""

    job: JobConfig
    source: PromptSource
    functions: Sequence[FunctionSpec]
    costs: Priors

    @property
    def unit(self) -> str:
        return "GPU" if any(spec.gpus for spec in self.functions) else "replica"

    def usd(self, usage: Sequence[Usage], now_s: float) -> float | None:
        """What the usage costs at the job's prices; None where it has none."""
        if not any(spec.usd_per_hour for spec in self.functions):
            return None
        return total(costs_of(usage, self.functions, now_s)).usd

    def _gpus(self, gpus: int) -> int:
        return gpus if self.unit == "GPU" else 1

    @property
    def algorithm(self) -> Json:
        return dict(self.job.algorithm)

    def prompts(self) -> PromptSource:
        return replace(self.source, shuffle=self.job.data.shuffle)

    def adapted(self, policy: Policy) -> Policy:
        return replace(policy, colocated=False)

    def specs(self, policy: Policy) -> list[FunctionSpec]:
        return [replace(spec, gpus=self._gpus(spec.gpus)) for spec in self.functions]

    def limits(self, policy: Policy) -> dict[str, FunctionLimits]:
        found = function_limits(self.job, self.functions)
        return {name: replace(limits, gpus=self._gpus(limits.gpus)) for name, limits in found.items()}

    def priors(self, policy: Policy) -> Priors:
        return self.costs

    def turns(self, policy: Policy) -> Priors | None:
        return None

    def models(self, policy: Policy) -> dict[str, Model]:
        kv, found = self.limits(policy)["generate"].kv_tokens, dict[str, Model]()
        for spec in self.functions:
            start_s = self.costs.start_s[spec.name]
            if spec.kind == "generate":
                assert self.costs.generate is not None, "replay has looked"
                found[spec.name] = Generate(self.costs.generate, self.lengths, start_s, 0.0, 0.0, self.slots, kv)
            else:
                cost = self.costs.work[spec.name]
                found[spec.name] = Work(KINDS[spec.kind], cost, start_s, state_s=cost.shared_s / 2)
        return found


def replay(run: RunDirectory) -> Recorded:
    """Raises RunError, in one line, for a run whose trace lacks something."""
    job = run.job
    if job.environment is not None:
        raise RunError(f"{run.path}: has episodes, whose turns and answers are not replayed")
    prepared = prepare(job)
    steps = finished_steps(run, prepared.source)
    lengths = _lengths(run, job, steps)
    generate, work, start_s = _measured(run, job, prepared.specs, steps)
    held = "GPUs" if any(s.gpus for s in prepared.specs) else "replicas"
    return Recorded(
        name=job.name,
        device=Device(held, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, None, f"measured in {run.path}"),
        model=ModelShape(job.name, 0.0, 0, 0, 0),
        gpus=sum(spec.max_replicas * spec.gpus for spec in prepared.specs)
        or sum(spec.max_replicas for spec in prepared.specs),
        recipe=job.recipe,
        lengths=LengthTrace(lengths),
        prompts_per_step=job.data.prompts_per_step,
        samples_per_prompt=job.rollout.n,
        max_response_length=job.rollout.max_response_length,
        steps=len(steps),
        slots=job.rollout.slots,
        seed=job.seed,
        job=job,
        source=prepared.source,
        functions=prepared.specs,
        costs=Priors(generate, work, start_s),
    )


def _lengths(run: RunDirectory, job: JobConfig, steps: Sequence[PastStep]) -> dict[tuple[int, int, int], int]:
    found: dict[tuple[int, int, int], int] = {}
    trace = run.path / "trace.json"
    for expected, step in enumerate(steps, start=1):
        if step.step != expected:
            raise RunError(f"{trace}: lacks the lengths of step {expected}: a replay needs every step from the first")
        for group, lengths in enumerate(step.lengths):
            if len(lengths) != job.rollout.n:
                raise RunError(
                    f"{trace}: step {expected}, group {group} has {len(lengths)} lengths, rollout.n is {job.rollout.n}"
                )
            found |= {(expected, group, index): length for index, length in enumerate(lengths)}
    return found


def _measured(
    run: RunDirectory, job: JobConfig, specs: Sequence[FunctionSpec], steps: Sequence[PastStep]
) -> tuple[GenerateCost, Mapping[str, WorkCost], Mapping[str, float]]:
    planner = adaptive_planner(job, specs)
    for step in steps:
        planner.recall(step, job.rollout.max_response_length)
    generate = planner.learned.generate
    work = {spec.name: cost for spec in specs if (cost := planner.learned.work(spec.name)) is not None}
    missing = [s.name for s in specs if s.kind != "generate" and s.name not in work]
    missing += ["generate"] if generate is None else []
    if generate is None or missing:
        raise RunError(f"{run.path / 'trace.json'}: has no calls with counts of {', '.join(missing)}")
    return generate, work, {spec.name: planner.learned.start_s(spec.name) for spec in specs}
