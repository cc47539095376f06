"""Steps that are worked out side by side: each as if alone, the best of them found."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.planner.base import TAIL, FunctionLimits
from orchestrator.planner.case import Case, Workload
from orchestrator.planner.costs import Costs
from orchestrator.planner.cuts import Cuts, Dealt
from orchestrator.planner.latency import GenerateCost, WorkCost
from orchestrator.planner.outline import RIVALS, Outliner, Outlines
from orchestrator.planner.policies import ADAPTIVE
from orchestrator.planner.scaling import EXCHANGES, worth
from orchestrator.planner.tail import ShardState, Tail, TailChoice


def costs(followers: dict[str, WorkCost], pool_gpus: int | None) -> Costs:
    trainers = {"train": WorkCost(1.0, 0.0, 2e-3, 4.0), "train-critic": WorkCost(0.5, 0.0, 1e-3, 2.0)}
    limits = {
        "generate": FunctionLimits(8, 0.0, 1, max_batch=8),
        TAIL: FunctionLimits(2, 0.0, 2, max_batch=8),
        "reward": FunctionLimits(2, 0.0, 0),
        "reference": FunctionLimits(4, 0.0, 1),
        "train": FunctionLimits(8, 0.0, 1, min_replicas=2),
        "train-critic": FunctionLimits(4, 0.0, 1, min_replicas=1),
    }
    generate = GenerateCost(0.2, 1e-3, 0.02, 1e-3, 1e-7)
    return Costs(
        generate, followers, trainers, dict.fromkeys(limits, 1.5),
        {name: float(limit.gpus or 0.1) for name, limit in limits.items()}, limits, frozenset(), 0.1,
        pool_gpus=pool_gpus, tail=GenerateCost(0.2, 5e-4, 0.012, 6e-4, 6e-8),
    )  # fmt: skip


def dealt(known: Costs, load: Workload, shards: list[list[int]]) -> Dealt:
    states = [
        ShardState.of(load.prompt_tokens[shard], load.lengths[shard], known.generate, 8, 50.0 * len(shard), shard)
        for shard in (np.array(numbers) for numbers in shards)
    ]
    return Dealt(shards, Tail(states, known.generate, max_batch=8, kv_tokens=None, function=known.tail_function))


def ways(seed: int, known: Costs) -> tuple[Workload, list[Dealt]]:
    """24 samples, two to a prompt, dealt at random to 1, 3, 4 and 6 shards."""
    rng = np.random.default_rng(seed)
    load = Workload(rng.uniform(20, 60, 24), np.minimum(rng.lognormal(5.0, 0.8, 24), 900.0), 2)
    dealings = [[part.tolist() for part in np.array_split(rng.permutation(24), count)] for count in (1, 3, 4, 6)]
    return load, [dealt(known, load, shards) for shards in dealings]


EVERY = st.sampled_from(range(len(EXCHANGES)))


def values(found: Outlines, exchange: float, ways: int) -> list[float]:
    """What is minimised, of the best step with each way, planned for that exchange."""
    own = worth(exchange, found.steady_s, found.cost)
    return [float(own[(found.steps.way == way) & (found.steps.exchange == exchange)].min()) for way in range(ways)]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), EVERY, st.sampled_from([None, 10]), st.booleans())
def test_a_step_is_what_it_is_alone(seed: int, k: int, pool_gpus: int | None, without: bool) -> None:
    """Whatever stands beside it in the arrays: ways with other numbers of shards, cuts, micro-batches and exchanges."""
    stages = {"reward": WorkCost(0.2, 0.05, 0.0), "reference": WorkCost(0.3, 0.0, 1e-3, first_s=0.4)}
    known = costs({} if without else stages, pool_gpus)
    load, dealings = ways(seed, known)
    outliner = Outliner(Case(known, ADAPTIVE, load, frozenset({"train"})))
    together = values(outliner.outlines(dealings, rivals=math.inf), EXCHANGES[k], len(dealings))
    alone = [values(outliner.outlines([way], rivals=math.inf), EXCHANGES[k], 1)[0] for way in dealings]
    assert together == pytest.approx(alone)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), EVERY, st.sampled_from([None, 10]))
def test_only_ways_that_are_behind_are_left_with_their_most_promising_cut(
    seed: int, k: int, pool_gpus: int | None
) -> None:
    """The others are as good as when all are worked out; nothing gets better by looking at less."""
    known = costs({"reference": WorkCost(0.3, 0.0, 1e-3)}, pool_gpus)
    load, dealings = ways(seed, known)
    outliner = Outliner(Case(known, ADAPTIVE, load, frozenset({"train"})))
    every, some, first = (
        values(outliner.outlines(dealings, rivals=rivals), EXCHANGES[k], len(dealings))
        for rivals in (math.inf, RIVALS, 0.0)
    )
    for all_, some_, first_ in zip(every, some, first, strict=True):
        assert some_ == pytest.approx(all_) or (
            some_ == pytest.approx(first_) and first_ > 0.9 * math.log(RIVALS) + min(first)
        )
        assert all_ <= some_ + 1e-9


class Only(Cuts):
    """One cut of the tail."""

    tail: TailChoice

    def of(self, dealt: Dealt) -> list[list[TailChoice]]:
        return [[self.tail] for _ in EXCHANGES]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), EVERY, st.sampled_from([None, 10]))
def test_no_cut_that_is_worked_out_is_better_than_the_one_found(seed: int, k: int, pool_gpus: int | None) -> None:
    known = costs({}, pool_gpus)
    load, dealings = ways(seed, known)
    case = Case(known, ADAPTIVE, load, frozenset({"train"}))
    outliner = Outliner(case)
    for way in dealings:
        found = values(outliner.outlines([way]), EXCHANGES[k], 1)
        one = Outliner(case)
        one.cuts = only = Only(case)
        ranks = []
        for only.tail in outliner.cuts.of(way)[k]:
            ranks += values(one.outlines([way]), EXCHANGES[k], 1)
        assert len(ranks) > 1
        assert found == pytest.approx([min(ranks)])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([None, 10]))
def test_every_exchange_has_the_best_plan_by_its_own_measure(seed: int, pool_gpus: int | None) -> None:
    """Of all that are worked out, but for 10 %, which is what choosing stage after stage may miss (6.7 % in 960
    cases, 9.0 % in one that a search found); no goal loses it: each chooses from all of them."""
    known = costs({"reference": WorkCost(0.3, 0.0, 1e-3)}, pool_gpus)
    load, dealings = ways(seed, known)
    found = Outliner(Case(known, ADAPTIVE, load)).outlines(dealings)
    for exchange in EXCHANGES:
        value = worth(exchange, found.steady_s, found.cost)
        assert value[found.steps.exchange == exchange].min() <= math.log(1.1) + value.min()
