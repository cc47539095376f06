"""What a step and the job will take and cost with the job's planner, before it is run.

The planner is asked for two steps in a row: the first starts from nothing, the second as all that follow. Validation
is not part of it, nor are functions of which nothing is known (`unknown`).
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from orchestrator.base.errors import RunError
from orchestrator.job.data import Cursor
from orchestrator.job.functions import function_limits
from orchestrator.job.prompts import Draw
from orchestrator.planner.adaptive import AdaptivePlanner
from orchestrator.planner.base import TAIL, CurvePoint, StepPlan, StepRequest
from orchestrator.planner.fusion import replica_counts
from orchestrator.planner.prefixes import Prefixes
from orchestrator.planner.scaling import Unmet
from orchestrator.planner.tail import ShardState, Tail
from orchestrator.run.directory import RunDirectory
from orchestrator.session.history import finished_steps
from orchestrator.session.job_planner import adaptive_planner
from orchestrator.session.plan_request import plan_request
from orchestrator.session.session import Prepared

NO_BASIS = (
    'nothing to predict by: name the GPU ([planner] gpu = "L40S"; functions.generate.gpus >= 1), '
    "or a run of this job (--run DIR)"
)


@dataclass(frozen=True)
class Life:
    """A replica from `start_s` to `stop_s` of a step."""

    function: str
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class Forecast:
    basis: str
    """What was predicted from."""
    first: StepPlan
    steady: StepPlan
    lives: Sequence[Life]
    """Of replicas in a steady step."""
    curve: Sequence[CurvePoint]
    chosen: CurvePoint
    unknown: Sequence[str]
    """Functions whose time nothing is known of."""
    job_s: float
    job_usd: float


def forecast(prepared: Prepared, run: RunDirectory | None = None) -> Forecast:
    """Raises RunError, in one line, where there is nothing to predict by, or no plan meets what was asked for."""
    job = prepared.job
    planner, cap = adaptive_planner(job, prepared.specs), job.rollout.max_response_length
    basis = f"the roofline of {job.planner.gpu}; lengths of any order of magnitude, cold starts as on record"
    if run is not None:
        steps = finished_steps(run, prepared.source)
        for step in steps:
            planner.recall(step, cap)
        basis = f"{len(steps)} steps of {run.path}"
    if planner.learned.generate is None:
        raise RunError(NO_BASIS)
    draw = Draw(prepared.source, Cursor.start(job.seed), job.data.prompts_per_step)
    limits = function_limits(job, prepared.specs)
    first, then = (plan_request(job, n, draw.next(), limits, prepared.settings) for n in (1, 2))
    try:
        cold = planner.plan(first)
        before = copy.deepcopy(planner)
        steady = planner.plan(then)
        curve = _curve(before, then, steady)
    except Unmet as error:
        raise RunError(f"planner: {error}") from None
    again = job.steps - 1
    return Forecast(
        basis=basis,
        first=cold,
        steady=steady,
        lives=lives(planner, then, steady, cold.keep | frozenset(cold.prewarm_next_s)),
        curve=curve,
        chosen=next(p for p in curve if p.replicas == steady.chosen),
        unknown=[n for n in limits if not _known(planner, n)],
        job_s=(cold.predicted_step_s or 0.0) + again * (steady.predicted_step_s or 0.0),
        job_usd=(cold.predicted_cost_usd or 0.0) + again * (steady.predicted_cost_usd or 0.0),
    )


def _known(planner: AdaptivePlanner, function: str) -> bool:
    learned = planner.learned
    costs = {"generate": learned.generate, TAIL: learned.tail}
    return (costs[function] if function in costs else learned.work(function)) is not None


def _curve(planner: AdaptivePlanner, request: StepRequest, plan: StepPlan) -> list[CurvePoint]:
    """T(N), C(N) with every point worked out in full; of policies that do not choose N: what they would plan if other
    numbers were configured.
    """
    generate = request.functions["generate"]
    found: dict[int, CurvePoint] = {}
    if len(plan.curve) > 1:
        planner.detailed = True
        found = {point.replicas: point for point in planner.plan(request).curve}
    else:
        for count in replica_counts(generate.max_replicas):
            fewer = dict(request.functions) | {"generate": replace(generate, max_replicas=count)}
            found |= {p.replicas: p for p in copy.deepcopy(planner).plan(replace(request, functions=fewer)).curve}
    found |= {point.replicas: point for point in plan.curve if point.replicas == plan.chosen}
    return sorted(found.values(), key=lambda p: p.replicas)


def lives(planner: AdaptivePlanner, request: StepRequest, plan: StepPlan, warm: frozenset[str]) -> list[Life]:
    """Each replica from its start to its end within the step, as the plan means it.

    A replica of generate ends with its shard, or with the cut; those that the tail moves to stay to the end, unless
    it moves to another function. Functions that are kept are there for the whole step.
    """
    step_s = plan.predicted_step_s or 0.0
    found: list[Life] = []
    for stage in plan.stages:
        name, count = stage.function, plan.replicas[stage.function]
        start_s = 0.0 if name in warm else max(0.0, stage.start_s - planner.learned.start_s(name))
        start_s = min(start_s, plan.prewarm_s.get(name, start_s))
        ends = _ends(planner, request, plan, stage.start_s, stage.stop_s) if name == "generate" else None
        for k in range(count):
            end_s = step_s if name in plan.keep else stage.stop_s if ends is None else ends[k]
            found.append(Life(name, start_s, end_s))
        if name in plan.prewarm_next_s and name not in plan.keep:
            found += [Life(name, min(step_s, plan.prewarm_next_s[name]), step_s)] * count
    return found


def _ends(planner: AdaptivePlanner, request: StepRequest, plan: StepPlan, begin_s: float, end_s: float) -> list[float]:
    cost, limits = planner.learned.generate, request.functions["generate"]
    assert cost is not None, "the caller has looked"
    n = request.samples_per_prompt
    prompt = np.array([len(p.tokens) for p in request.prompts], dtype=np.float64)
    drawn = planner.lengths.predict(request.prompts, request.max_response_length).samples(n, request.step)
    prefixes = Prefixes([p.tokens for p in request.prompts])
    states = []
    for shard in plan.shards:
        numbers = np.asarray(shard)
        prefill = float(prefixes.tokens(np.unique(numbers // n)))
        states.append(ShardState.of(prompt[numbers // n], drawn[numbers], cost, limits.max_batch, prefill))
    tail = Tail(states, cost, max_batch=limits.max_batch, kv_tokens=limits.kv_tokens)
    left = tail.leftover(plan.cut_below)
    if left is None:
        return [begin_s + float(end) for end in tail.ends]
    ends = sorted(begin_s + float(end) for end in np.minimum(tail.ends, left.at_s))
    stay = plan.migrate_to if plan.tail == "generate" else 0
    return ends[: len(ends) - stay] + [end_s] * stay
