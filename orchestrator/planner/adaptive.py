"""The planner that learns: lengths, costs, cold starts; and decides what its policy leaves open (policies.py).

    observe: lengths (EWMA, ratios), latency models (least squares), cold starts
    plan:    predict lengths -> runs of similar length for each N (or balanced shards) -> outline of each -> the goal's

Until `generate` has been observed (or has a prior) there is nothing to decide by: the plan is the static one.
"""

import contextlib
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from orchestrator.planner.base import (
    ENVIRONMENT,
    GENERATE,
    TAIL,
    CurvePoint,
    FunctionLimits,
    PastStep,
    StepObservation,
    StepPlan,
    StepRequest,
)
from orchestrator.planner.case import Case, Workload
from orchestrator.planner.costs import Costs
from orchestrator.planner.cuts import Dealt
from orchestrator.planner.dealings import dealings, promising, states
from orchestrator.planner.episodes import resume_cost
from orchestrator.planner.learned import LearnedCosts, Priors
from orchestrator.planner.lengths import LengthModel
from orchestrator.planner.outline import RIVALS, Outline, Outliner, Outlines
from orchestrator.planner.policies import TURNS, Policy
from orchestrator.planner.prefixes import Prefixes
from orchestrator.planner.prewarm import prewarm_at_s
from orchestrator.planner.scaling import Goal, Unmet, choose
from orchestrator.planner.static import StaticPlanner, check
from orchestrator.planner.tail import ShardState, Tail
from orchestrator.planner.training import PACES

Kind = Literal["turns", "fused turns", "own"]
"""Of a step: in turns, one stage after the other or with stages beside generation; or each function on its own GPUs."""

PACES_KEPT = 16
CHANGE = 1.03
"""How much better it has to be to hold more or fewer GPUs for turns than in the last step, or none; and to begin stages
beside generation in turns: what they wait for there is not all foreseen."""
HELD = (8, 6, 4)
"""Eighths of a pool that may be held for turns; each makes planning longer."""
GUESSED: Mapping[Kind, float] = {"turns": 1.0, "fused turns": 1.1, "own": 1.25}
"""How far steps go beyond their predictions before any length was seen, against those where none waits for what another
one holds (a handful of simulated first steps, most of 7B PPO)."""
SLOW = 0.85
"""Quantile of the steps' paces that is slow: a deadline is planned for with it."""
HAND_OVER_S = 0.005
"""What a replica needs to hand samples over, however many: encode, write, tell. Measured on the local platform:
4 ms of CPU in all processes together (2 CPU cores, 2026-11-21)."""


class AdaptivePlanner:
    """`pool_gpus`: GPUs that all functions share (None: each function has its own).

    `turns`: what functions cost that take turns on them; None: they cannot.
    `detailed`: all points of the curve are worked out in full, not only those whose first estimate is best.
    """

    def __init__(
        self, policy: Policy, *, goal: Goal | None = None, priors: Priors | None = None,
        pool_gpus: int | None = None, gangs: Collection[str] = ("train",), turns: Priors | None = None,
        detailed: bool = False,
    ) -> None:  # fmt: skip
        self.policy = policy
        self.goal = goal or Goal()
        self.lengths = LengthModel()
        self.learned = LearnedCosts(priors, gangs=gangs, shared=pool_gpus is not None)
        self.turns = None if turns is None else LearnedCosts(turns, gangs=gangs, shared=True)
        if self.turns is not None:
            self.turns.passes = self.learned.passes  # a recipe's, in turns or not
        self.pool_gpus = pool_gpus
        self.detailed = detailed
        self._static = StaticPlanner(keep_warm=policy.keep)
        self._warm: frozenset[str] = frozenset()
        self._last: StepPlan | None = None
        self._begun = False
        """After the first step, in which the platform starts too."""
        self._prewarmed: frozenset[str] = frozenset()
        self._pace: dict[Kind, deque[float]] = {kind: deque(maxlen=PACES_KEPT) for kind in GUESSED}
        """How long steps took against their predictions, by kind; without that before any length was seen,"""
        self._guessed = 1.0
        """which is what a kind that was not tried is weighed by, unless that step was of the kind:"""
        self._first: Kind = "own"
        self._episodes = False

    def plan(self, request: StepRequest) -> StepPlan:
        check(request)
        self._last = self._plan(request)
        self._prewarmed = frozenset(self._last.prewarm_s) | self._warm
        self._warm = (self._last.keep if not self._last.turns else frozenset()) | frozenset(self._last.prewarm_next_s)
        return self._last

    def observe(self, observation: StepObservation) -> dict[str, float]:
        metrics = self._static.observe(observation)
        for name in self._prewarmed:  # partly over when they were called
            metrics.pop(f"planner/start_s/{name}", None)
        guessed = not self.lengths.ewma
        metrics |= self.lengths.observe(observation.lengths)
        every = np.array([x for values in observation.lengths.values() for x in values], dtype=np.float64)
        learned, ahead = self.learned, self._prewarmed
        if self.turns is not None and self._last is not None and self._last.turns:
            learned, ahead = (
                self.turns,
                frozenset(call.function for call in observation.calls),
            )  # a start waits its turn
        metrics |= learned.observe(observation.calls, every, observation.step_s if self._begun else None, ahead)
        self._begun = True
        if self._last is not None and self._last.predicted_step_s is not None:
            predicted = {"step": (self._last.predicted_step_s, observation.step_s)}
            pace = observation.step_s / self._last.predicted_step_s
            kind = _kind(self._last.turns > 0, self._last.overlap)
            if guessed:
                self._guessed, self._first = max(1.0, pace), kind
            else:
                self._pace[kind].append(pace)
            if self._last.predicted_cost_usd is not None and observation.cost_usd > 0:
                predicted["cost"] = (self._last.predicted_cost_usd, observation.cost_usd)
            for name, (was, is_) in predicted.items():
                metrics[f"planner/predicted/{name}"] = was
                metrics[f"planner/error/{name}"] = abs(was - is_) / is_ if is_ else 0.0
        return metrics

    def recall(self, past: PastStep, cap: int) -> None:
        self._static.recall(past, cap)
        self.lengths.predict(past.prompts, cap)
        self.lengths.observe(past.by_prompt)
        every = np.array([length for lengths in past.lengths for length in lengths], dtype=np.float64)
        self.learned.observe(past.calls, every, past.step_s, past.prewarmed)

    def _plan(self, request: StepRequest) -> StepPlan:
        generate = self.learned.generate
        if not request.prompts:
            return self._static.plan(request)
        predicted = self.lengths.predict(request.prompts, request.max_response_length)
        if generate is None:
            overlap = self.policy.fuse != "no" and self.goal != Goal("cost")  # who works beside it waits, too
            return replace(self._static.plan(request), overlap=overlap)
        n = request.samples_per_prompt
        prompt_tokens = np.array([len(p.tokens) for p in request.prompts], dtype=np.float64)
        waits_s, policies = None, (self.policy, *TURNS)
        self._episodes = ENVIRONMENT in request.functions
        if self._episodes:  # samples go on turn by turn: no tail is cut
            waits_s = self._static.episodes.totals(request.prompts, n, request.step)
            policies = tuple(replace(p, cut="never", tail_function=False) for p in (self.policy, TURNS[0]))
        load = Workload(np.repeat(prompt_tokens, n), predicted.samples(n, request.step), n, waits_s)
        cases = [Case(self._costs(request, self.learned), policies[0], load, request.streamed, self._paces("own"))]
        if self.turns is not None:
            for held in _held(self._costs(request, self.turns)):
                ways = policies[1:] if held.pool_gpus == self.pool_gpus else policies[-1:]
                for policy in ways:
                    paces = self._paces(_kind(True, policy.fuse != "no"))
                    cases.append(Case(held, policy, load, frozenset(), paces))
        prefixes = Prefixes([p.tokens for p in request.prompts])
        usd = 1.0 if any(f.usd_per_hour > 0 for f in request.functions.values()) else 0.0
        fronts: list[tuple[Case, Outlines]] = []
        points: list[CurvePoint] = []
        places: list[tuple[int, int]] = []
        dealt: list[Dealt] = []
        for case in cases:
            if not fronts or case.costs is not fronts[-1][0].costs:  # else they are dealt and end alike
                every = dealings(case, predicted, prefixes, self._most(case.costs.limits[GENERATE]))
                dealt = [
                    Dealt(dealing.shards, self._tail(states(case, dealing.shards, prefixes), case), waits_s)
                    for dealing in promising(case, every, self.detailed)
                ]
            front = Outliner(case).outlines(dealt, rivals=math.inf if self.detailed else RIVALS)
            columns = (front.steps.shards, front.steady_s, usd * front.cost, front.gpu_s)
            places += [(len(fronts), row) for row in range(len(front.cost))]
            points += [CurvePoint(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
            fronts.append((case, front))
        by = [self._factor(case) for case, _ in fronts]
        factors = zip(points, [by[at] for at, _ in places], strict=True)
        weighed = [replace(p, time_s=f * p.time_s, cost_usd=f * p.cost_usd) for p, f in factors]
        place = self._choose(weighed, points)
        case, front = fronts[places[place][0]]
        order = sorted(points, key=lambda p: self.goal.rank(p.time_s, p.cost_usd), reverse=True)
        curve = {p.replicas: p for p in (*order, points[place])}
        return self._to_plan(request, points[place], front.outline(places[place][1]), [*curve.values()], case)

    def _factor(self, case: Case) -> float:
        """By which points are weighed: as such steps went against their predictions; what it costs to begin to take
        turns, or to end it, has to come back."""
        if self.turns is None:
            return 1.0
        turns = _turns(case)
        kind = _kind(turns > 0, case.policy.fuse != "no")
        if not self.lengths.ewma:
            return 1.0 if self._episodes else GUESSED[kind]
        changes = 0 if self._last is None else (self._last.turns != turns) + (kind == "fused turns")
        return float(self._usual(kind) * CHANGE**changes)

    def _usual(self, kind: Kind) -> float:
        """How steps of a kind go against their predictions, and points are weighed by; one kind of turns says what the
        other does, and functions on their own GPUs go no better than what was tried, but in episodes: most of their
        steps is tools, whose answers wait for no GPU."""
        if self.turns is None:
            return 1.0
        like: tuple[Kind, ...] = ("own",) if kind == "own" else ("turns", "fused turns")
        tried = self._pace[kind] or [pace for k in like for pace in self._pace[k]]
        if tried or self._episodes or self._first in like:
            return float(np.median([1.0, 1.0, *tried]))
        return max(self._guessed, float(np.median([1.0, 1.0, *(pace for p in self._pace.values() for pace in p)])))

    def _tail(self, states: Sequence[ShardState], case: Case) -> Tail:
        costs = case.costs
        limits, function = costs.limits[GENERATE], costs.tail_function if case.policy.tail_function else None
        return Tail(states, costs.generate, max_batch=limits.max_batch, kv_tokens=limits.kv_tokens, function=function)

    def _paces(self, kind: Kind) -> Sequence[float]:
        """How steps went against their predictions: a low, a middle and a high one."""
        if len(self._pace[kind]) < PACES_KEPT // 2:
            return PACES
        return [float(q) for q in np.quantile(np.array(self._pace[kind]), (0.15, 0.5, SLOW))]

    def _choose(self, points: Sequence[CurvePoint], predicted: Sequence[CurvePoint]) -> int:
        """The place of the point that meets the goal, with the margin where one does; the fastest of those that do as
        `predicted`, where none does as steps went, or that would if they went as well as steps may (PACES). Before any
        length was seen no prediction says whether a deadline or a budget will be met: the knee.
        """
        if self.policy.replicas == "goal":
            limited = self.goal.deadline_s is not None or self.goal.budget_usd is not None
            if limited and not self.lengths.ewma:
                return choose(points, Goal())
            fastest = replace(self.goal, objective="speed")
            late = replace(fastest, deadline_s=self.goal.deadline_s and self.goal.deadline_s / PACES[0])
            for among, goal in ((points, self._goal()), (points, self.goal), (predicted, fastest), (predicted, late)):
                with contextlib.suppress(Unmet):
                    return choose(among, goal)
            return choose(predicted, fastest)
        full = max(points, key=lambda p: p.replicas)
        if self.policy.replicas == "all":
            return points.index(full)
        weighed = [0.5 * p.time_s / full.time_s + 0.5 * _ratio(p.cost_usd, full.cost_usd) for p in points]
        return weighed.index(min(weighed))

    def _goal(self) -> Goal:
        """What is planned for: a deadline is met when steps that go as far beyond their predictions as one in seven did
        still meet it.
        """
        if self.goal.deadline_s is None:
            return self.goal
        pace = [each / self._usual(kind) for kind, paces in self._pace.items() for each in paces]
        late = float(np.quantile(np.array(pace), SLOW)) if pace else PACES[-1]
        return replace(self.goal, deadline_s=self.goal.deadline_s / max(1.0, late))

    def _to_plan(
        self, request: StepRequest, point: CurvePoint, chosen: Outline, curve: Sequence[CurvePoint], case: Case
    ) -> StepPlan:  # fmt: skip
        policy, costs = case.policy, case.costs
        replicas = {
            name: len(chosen.shards) if name == GENERATE
            else chosen.followers[name] if name in chosen.followers
            else chosen.trainers[name].replicas if name in chosen.trainers
            else chosen.tail.migrate_to * (chosen.tail.function == name) if name == TAIL
            else limits.max_replicas
            for name, limits in request.functions.items()
        }  # fmt: skip
        last_s = chosen.generated_s  # what starts after it is tied to the last sample (orchestrator/step/plan_clock.py)
        streams = {name: t for name, t in chosen.trainers.items() if t.streamed}
        groups = {name: t.groups for name, t in streams.items() if t.groups and t.open_s < last_s}
        if ENVIRONMENT in replicas:  # when episodes may have ended says more (step/episodes.py)
            groups = dict.fromkeys(groups, 0)
        # Whole groups that come early are no sign that the last will, so the planned time is waited for too; not for
        # speed, nor before any length was seen: the groups say more than it does.
        early = self.goal.objective == "speed" or not self.lengths.ewma
        stream_s = {name: t.call_s if name not in groups else 0.0 if early else t.open_s for name, t in streams.items()}
        prewarm: dict[str, float] = {}
        ahead: dict[str, float] = {}
        if policy.prewarm:
            prewarm = {
                stage.function: prewarm_at_s(stage.start_s, self.learned.starts_s(stage.function))
                for stage in chosen.stages
                if stage.function in chosen.prewarm and stage.function not in {GENERATE, *groups}
            }
            if chosen.tail.function == TAIL:
                prewarm[TAIL] = chosen.open_s
            if GENERATE in chosen.prewarm:
                end_s = last_s + self._least_after_s(chosen, costs)
                ahead = {GENERATE: prewarm_at_s(end_s, self.learned.starts_s(GENERATE))}
        return StepPlan(
            replicas=replicas,
            shards=chosen.shards,
            micro_batch=chosen.micro_batch,
            overlap=policy.fuse != "no",
            stream_s=stream_s,
            stream_groups=groups,
            chunk=16 if policy.fuse == "no" and ENVIRONMENT not in replicas else self._chunk(chosen),
            stream_part=max(request.samples_per_prompt, -(-len(request.prompts) * request.samples_per_prompt // 128)),
            cut_below=chosen.tail.cut_below,
            migrate_to=chosen.tail.migrate_to,
            tail=chosen.tail.function,
            keep=frozenset(request.functions) - {TAIL} if policy.keep else frozenset(),
            turns=_turns(case) if self.turns is not None else 0,
            prewarm_s=prewarm,
            prewarm_next_s=ahead,
            generated_s=last_s,
            waits=self._static.episodes.waits(),
            catch_up_s=max((self._catch_up_s(name, replicas[name], case) for name in streams), default=0.0),
            resume=resume_cost(costs.generate),
            predicted_step_s=chosen.time_s,
            predicted_cost_usd=point.cost_usd,
            stages=chosen.stages,
            curve=sorted(curve, key=lambda p: (p.replicas, p.time_s)),
            chosen=len(chosen.shards),
        )

    @staticmethod
    def _catch_up_s(name: str, ranks: int, case: Case) -> float:
        samples, tokens = len(case.load.tokens), float(case.load.tokens.sum())
        return case.costs.start_s[name] + case.costs.trainers[name].ranked_s(samples, tokens, ranks)

    def _least_after_s(self, chosen: Outline, costs: Costs) -> float:
        """From the last sample to the step's end when generation takes longer than planned: streamed training
        catches up, but for publishing and the last sample's own work.
        """
        planned_s, slow_s = chosen.time_s - chosen.generated_s, (PACES[-1] - 1.0) * chosen.generated_s
        found = [0.0]
        for name, gang in chosen.trainers.items():
            own_s = costs.trainers[name].own_s(gang.replicas) / 2
            behind_s = gang.end_s - own_s - chosen.generated_s
            catches_up = gang.call_s + own_s < chosen.generated_s
            found.append(own_s + (max(0.0, behind_s - slow_s) if catches_up else behind_s))
        return min(planned_s, max(found))

    def _chunk(self, chosen: Outline) -> int:
        """As few samples at a time as leave a replica 95 % of its time for generation."""
        generation_s = next(s.stop_s - s.start_s for s in chosen.stages if s.function == GENERATE)
        longest = max(len(shard) for shard in chosen.shards)
        return max(1, min(longest, math.ceil(longest * HAND_OVER_S / (0.05 * max(generation_s, 1e-9)))))

    def _costs(self, request: StepRequest, learned: LearnedCosts) -> Costs:
        generate = learned.generate
        assert generate is not None, "the caller has looked"
        asked = [name for name in request.functions if name not in (GENERATE, ENVIRONMENT)]
        work = {name: learned.work(name) for name in asked}
        known = {name: cost for name, cost in work.items() if cost is not None}
        priced = any(limits.usd_per_hour > 0 for limits in request.functions.values())
        return Costs(
            generate=generate,
            followers={
                name: cost.times(learned.passes.get(name, 1))
                for name, cost in known.items()
                if name not in learned.gangs
            },
            trainers={name: cost for name, cost in known.items() if name in learned.gangs},
            start_s={name: learned.start_s(name) for name in request.functions},
            price={
                name: limits.usd_per_hour / 3600.0 if priced else float(limits.gpus or 1)
                for name, limits in request.functions.items()
            },
            limits=request.functions,
            between_s=learned.between_s,
            warm=self._warm,
            tail=learned.tail,
            pool_gpus=self.pool_gpus,
        )

    def _most(self, limits: FunctionLimits) -> int:
        if self.pool_gpus is None or not limits.gpus:
            return limits.max_replicas
        return max(1, min(limits.max_replicas, self.pool_gpus // limits.gpus))


def _turns(case: Case) -> int:
    """GPUs that are held for turns."""
    return case.costs.pool_gpus or 0 if case.policy.colocated else 0


def _kind(turns: bool, fused: bool) -> Kind:
    return "own" if not turns else "fused turns" if fused else "turns"


def _held(costs: Costs) -> list[Costs]:
    """Of functions that take turns on so many of the pool's GPUs, the whole pool first."""
    pool, found = costs.pool_gpus or 0, list[Costs]()
    for gpus in dict.fromkeys(pool * eighths // 8 for eighths in HELD):
        limits = {
            name: replace(limit, max_replicas=min(limit.max_replicas, gpus // limit.gpus)) if limit.gpus else limit
            for name, limit in costs.limits.items()
        }
        if all(limit.max_replicas >= (limit.min_replicas or 1) for name, limit in limits.items() if name != TAIL):
            found.append(replace(costs, limits=limits, pool_gpus=gpus))
    return found


def _ratio(a: float, b: float) -> float:
    return a / b if b else 1.0
