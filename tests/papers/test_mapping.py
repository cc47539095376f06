"""HybridFlow's mapping: all partitions, all allocations, and times against brute reasoning on small cases."""

from __future__ import annotations

import pytest

from bench.papers.mapping import allocations, fixed_mapping, map_models, partitions
from bench.papers.mapping_costs import (
    HYBRIDFLOW,
    Batch,
    Parallelism,
    Role,
    cuts,
    filled,
    stage_times,
    times_of,
    width,
)
from orchestrator.planner.devices import shape
from orchestrator.planner.latency import forward_prior

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
    best = map_models(roles, HYBRIDFLOW, 32, Batch())
    for sets in ([roles], [[r] for r in roles], [[ACTOR, REFERENCE], [CRITIC, REWARD]]):
        fixed = fixed_mapping(sets, HYBRIDFLOW, 32, Batch())
        assert fixed is None or best.step_s <= fixed.step_s
    assert sum(gpus for _, gpus in best.sets) == 32


def test_parallelism_uses_all_gpus_and_fits() -> None:
    times = stage_times(Role("actor", LARGE, True, True), HYBRIDFLOW, 32, Batch())
    assert times is not None
    cut = times.parallelism
    assert cut.tensor * cut.pipeline * cut.data == 32
    assert LARGE.layers % cut.pipeline == 0
    assert 18 * LARGE.parameters / (cut.tensor * cut.pipeline) <= 0.8 * 80 * 2**30
    assert stage_times(Role("actor", shape("Llama-2-70B"), True, True), HYBRIDFLOW, 8, Batch()) is None


def test_more_gpus_are_not_slower_and_asked_models_only_prepare() -> None:
    few, many = (stage_times(REFERENCE, HYBRIDFLOW, n, Batch()) for n in (8, 64))
    assert few is not None
    assert many is not None
    assert few.preparation_s > 4 * many.preparation_s
    assert (few.generation_s, few.training_s) == (0.0, 0.0)


def test_what_does_not_fit_says_what_would() -> None:
    roles = [Role("actor", shape("Llama-2-70B"), True, True), Role("critic", shape("Llama-2-70B"), True)]
    with pytest.raises(ValueError, match=r"actor, critic need at least 40 x A100, there are 16"):
        map_models(roles, HYBRIDFLOW, 16, Batch())
    with pytest.raises(ValueError, match="12 GPUs are not whole nodes of 8"):
        map_models(roles, HYBRIDFLOW, 12, Batch())


def test_tiles_that_the_last_turn_does_not_fill_are_lost() -> None:
    # One tile of rows: 4 products; 7B on one GPU has h = 4096 (here 4190): 33 x 1 tiles and more, 108 at a time.
    assert filled(128, SMALL, 8, 108) < 0.4
    assert filled(1 << 17, SMALL, 1, 108) > 0.97
    assert width(LARGE) == pytest.approx(5120, rel=0.02)


def test_a_pipelines_turns_are_those_of_1f1b() -> None:
    """One sample a data rank and update: a pipeline of 2 has 2 turns of half the layers, no gain and a hand-over."""
    role = Role("critic", SMALL, True)
    one = times_of(role, HYBRIDFLOW, Parallelism(8, 1, 1), Batch(samples=1, updates=1))
    two = times_of(role, HYBRIDFLOW, Parallelism(8, 2, 1), Batch(samples=1, updates=1))
    many = times_of(role, HYBRIDFLOW, Parallelism(8, 2, 1), Batch(samples=64, updates=1))
    lone = times_of(role, HYBRIDFLOW, Parallelism(8, 1, 1), Batch(samples=64, updates=1))
    assert one is not None
    assert two is not None
    assert many is not None
    assert lone is not None
    assert two.preparation_s > one.preparation_s
    assert many.training_s / lone.training_s == pytest.approx((64 + 1) / 64 / 2, rel=0.15)


def test_gradients_cross_the_network_once_there_and_once_back() -> None:
    role, batch = Role("critic", LARGE, True), Batch()
    apart, near = (times_of(role, HYBRIDFLOW, Parallelism(8, 1, d), batch) for d in (4, 8))
    assert apart is not None
    assert near is not None
    work_s = 3 * batch.samples * batch.length * forward_prior(HYBRIDFLOW.gpu, LARGE).token_s
    ring_s = 8 * 4 * LARGE.parameters / 8 / (20e9 / 8)  # updates x fp32 x shard of a GPU over its share of the link
    assert apart.training_s > work_s / 32 + 2 * 3 / 4 * ring_s
    assert near.training_s > work_s / 64 + 2 * 7 / 8 * ring_s


def test_cuts_hold_the_states_and_stay_within_the_frameworks_pipelines() -> None:
    role = Role("actor", shape("Llama-34B"), True, True)
    assert all(18 * role.model.parameters / c.model <= 0.8 * 80 * 2**30 for c in cuts(role, HYBRIDFLOW, 32))
    assert {c.pipeline for c in cuts(role, HYBRIDFLOW, 32, 2)} == {2}
    assert not list(cuts(role, HYBRIDFLOW, 32, 1))


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("Llama-2-13B", ["colocate"] * 3 + ["split"] * 2), ("Llama-34B", ["colocate"] + ["split"] * 3)],
)
def test_with_pipelines_of_two_stages_large_clusters_are_split(name: str, kinds: list[str]) -> None:
    model = shape(name)
    roles = [Role("actor", model, True, True), Role("critic", model, True)]
    roles += [Role("reference", model, False), Role("reward", model, False)]
    sizes = [16, 32, 64, 96, 128][-len(kinds) :]
    assert [map_models(roles, HYBRIDFLOW, gpus, Batch(), 2).kind for gpus in sizes] == kinds
    assert map_models(roles, HYBRIDFLOW, 128, Batch()).kind == "colocate"  # deep pipelines: docs/reproduction.md
