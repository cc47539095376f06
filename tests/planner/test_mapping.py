"""HybridFlow's mapping: all partitions, all allocations, and times against brute reasoning on small cases."""

from __future__ import annotations

import pytest

from orchestrator.planner.devices import device, shape
from orchestrator.planner.mapping import (
    Batch,
    Role,
    allocations,
    fixed_mapping,
    map_models,
    partitions,
    stage_times,
)

A100 = device("A100")
SMALL, LARGE = shape("Llama-2-7B"), shape("Llama-2-13B")
ACTOR, CRITIC = Role("actor", SMALL, True, True), Role("critic", SMALL, True)
REFERENCE, REWARD = Role("reference", SMALL, False), Role("reward", SMALL, False)


def test_ppo_has_fifteen_partitions() -> None:
    found = [sorted(sorted(s) for s in p) for p in partitions(["a", "c", "r", "w"])]
    assert len(found) == 15
    assert len({str(p) for p in found}) == 15
    assert [["a", "c", "r", "w"]] in found


def test_allocations_are_all_and_respect_the_minima() -> None:
    assert list(allocations(4, [1, 2])) == [(1, 3), (2, 2)]
    assert list(allocations(2, [2, 1])) == []


def test_the_mapper_is_at_least_as_good_as_any_fixed_placement() -> None:
    roles = [ACTOR, CRITIC, REFERENCE, REWARD]
    best = map_models(roles, A100, 32, Batch())
    for sets in ([roles], [[r] for r in roles], [[ACTOR, REFERENCE], [CRITIC, REWARD]]):
        fixed = fixed_mapping(sets, A100, 32, Batch())
        assert fixed is None or best.step_s <= fixed.step_s
    assert sum(gpus for _, gpus in best.sets) == 32


def test_parallelism_uses_all_gpus_and_fits() -> None:
    times = stage_times(Role("actor", LARGE, True, True), A100, 32, Batch())
    assert times is not None
    cut = times.parallelism
    assert cut.tensor * cut.pipeline * cut.data == 32
    assert LARGE.layers % cut.pipeline == 0
    assert 18 * LARGE.parameters / (cut.tensor * cut.pipeline) <= 0.8 * 80 * 2**30
    assert stage_times(Role("actor", shape("Llama-2-70B"), True, True), A100, 8, Batch()) is None


def test_more_gpus_are_not_slower_and_asked_models_only_prepare() -> None:
    few, many = (stage_times(REFERENCE, A100, n, Batch()) for n in (8, 64))
    assert few is not None
    assert many is not None
    assert few.preparation_s > 4 * many.preparation_s
    assert (few.generation_s, few.training_s) == (0.0, 0.0)


def test_what_does_not_fit_says_what_would() -> None:
    roles = [Role("actor", shape("Llama-2-70B"), True, True), Role("critic", shape("Llama-2-70B"), True)]
    with pytest.raises(ValueError, match=r"actor, critic need at least 40 x A100, there are 16"):
        map_models(roles, A100, 16, Batch())
    with pytest.raises(ValueError, match="12 GPUs are not whole nodes of 8"):
        map_models(roles, A100, 12, Batch())
