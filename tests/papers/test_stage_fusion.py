"""RLHFuse's step, off and on: against the event simulation of decoding, the formula of 1F1B, and hand-made cases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.papers.fused_rollout import System, best_tensor, fused, in_turn, instances, saturation
from bench.papers.fused_training import Trained, train
from bench.papers.mapping_costs import NODE_GPUS, RLHFUSE, Parallelism, Role, turn_s, update_s
from orchestrator.planner.devices import kv_capacity_tokens, shape
from orchestrator.simulation.decoding import Item, schedule

SMALL, LARGE = shape("Llama-2-13B"), shape("Llama-33B")
PASSES = [Role("reference", SMALL, False), Role("reward", LARGE, False), Role("critic", LARGE, True)]
SYSTEM = System(RLHFUSE, 64, SMALL, PASSES, 10e9, 256, 512)
LENGTHS = np.clip(np.random.default_rng(0).lognormal(5.0, 0.86, 96), 1, 512).round()


def decoded_s(system: System, samples: list[tuple[int, int, int]], tensor: int, *, prefill: bool) -> float:
    """An instance, event by event: (prompt, tokens that are there, tokens in the end) of each sample."""
    cost = system.generate(tensor)
    cost = cost if prefill else replace(cost, prefill_token_s=0.0)
    items = [Item(k, *sample) for k, sample in enumerate(samples)]
    return float(schedule(items, cost, slots=256, kv_tokens=None, share_prefixes=False).finish_s.max())


def test_generation_without_fusion_is_the_event_simulations() -> None:
    shards = instances(SYSTEM, LENGTHS, 8)
    for k, shard in enumerate(shards):
        samples = [(256, 0, int(length)) for length in LENGTHS[k::8]]
        assert shard.finish_s[-1] == pytest.approx(decoded_s(SYSTEM, samples, 8, prefill=True))
    apart = in_turn(SYSTEM, LENGTHS, 8)
    assert apart.generated_s == max(float(s.finish_s[-1]) for s in shards)
    tokens = 256 + round(float(LENGTHS.mean()))
    assert apart.end_s == pytest.approx(apart.generated_s + SYSTEM.infer_s(96, tokens, 64, loads=False))


def test_what_is_left_goes_on_on_the_fullest_instances() -> None:
    """Two instances of one GPU, three samples each; when two are left, one has both: the event simulation's time."""
    system = replace(SYSTEM, gpus=2, passes=[])
    lengths = np.array([100.0, 100.0, 100.0, 100.0, 300.0, 400.0])
    apart, together = in_turn(system, lengths, 1), fused(system, lengths, 1, 2 / 6)
    assert together.kept == 1
    first, second = instances(system, lengths, 1)
    cut_s = float(max(first.finish_s[1], second.finish_s[1]))
    held = [
        100 + (cut_s - s.finish_s[1]) / (s.finish_s[2] - s.finish_s[1]) * (s.lengths[2] - 100) for s in (first, second)
    ]
    done = [round(tokens) for tokens in held]
    rest_s = decoded_s(system, [(256, done[0], 300), (256, done[1], 400)], 1, prefill=False)
    move_s = (256 + min(held)) * SMALL.kv_bytes_per_token / (RLHFUSE.network_bytes_s / NODE_GPUS)
    assert together.generated_s == pytest.approx(cut_s + move_s + rest_s, rel=0.01)
    assert together.end_s == together.generated_s > apart.generated_s


def test_inference_hides_behind_the_tail_as_far_as_the_freed_gpus_carry_it() -> None:
    apart, together = in_turn(SYSTEM, LENGTHS, 8), fused(SYSTEM, LENGTHS, 8, 0.2)
    assert together.kept < len(instances(SYSTEM, LENGTHS, 8))
    assert together.generated_s >= apart.generated_s
    assert together.generated_s < together.end_s < apart.end_s
    assert fused(SYSTEM, LENGTHS, 8, 0.0) == apart


def test_weights_in_cpu_memory_are_loaded_once_behind_the_tail_or_after_it() -> None:
    loads = replace(SYSTEM, loads=True)
    later_s = in_turn(loads, LENGTHS, 8).end_s - in_turn(SYSTEM, LENGTHS, 8).end_s
    assert later_s >= (SMALL.weight_bytes + LARGE.weight_bytes) / 8 / 63e9  # the critic's are there: it trains
    assert later_s <= (SMALL.weight_bytes + LARGE.weight_bytes) / 50e9
    assert fused(loads, LENGTHS, 8, 0.2).end_s - fused(SYSTEM, LENGTHS, 8, 0.2).end_s < later_s


def test_a_batch_of_the_saturation_decodes_a_quarter_slower() -> None:
    cost = SYSTEM.generate(8)
    batch = saturation(cost, 450.0)
    slower = [cost.decode_s(1, n, n * 450.0) / cost.step_s for n in (batch, batch + 1)]
    assert slower[0] <= 1.25 < slower[1]
    assert best_tensor(SYSTEM, LENGTHS) == 8
    assert batch * 450 < kv_capacity_tokens(RLHFUSE.gpu, SMALL, 8)


def test_pipelines_one_after_the_other_are_1f1b_and_fused_ones_lie_between_them_and_the_bound() -> None:
    actor, critic = Role("actor", SMALL, True, True), Role("critic", LARGE, True)
    models = [Trained.of(actor, 4, 256), Trained.of(critic, 8, 256)]
    found = train(RLHFUSE, models, 64, 450)
    turns = [turn_s(m.role, RLHFUSE, m.cut, found.serial_size * 450, training=True) for m in models]
    counts = [64 // m.cut.data // found.serial_size + m.cut.pipeline - 1 for m in models]
    assert found.serial_s == pytest.approx(sum(n * turn for n, turn in zip(counts, turns, strict=True)))
    assert found.bound_s <= found.fused_s < found.serial_s / 1.2
    assert found.update_s == sum(update_s(m.role.model, RLHFUSE, m.cut) for m in models)


def test_without_bubbles_there_is_nothing_to_fill() -> None:
    role = Role("critic", SMALL, True)
    found = train(RLHFUSE, [Trained.of(role, 1, 256), Trained.of(replace(role, name="other"), 1, 256)], 64, 450)
    assert found.fused_s == pytest.approx(found.serial_s, rel=0.01)


def test_states_that_leave_no_room_are_refused() -> None:
    models = [Trained.of(Role(name, LARGE, True), 1, 256) for name in ("critic", "other")]
    with pytest.raises(ValueError, match="no micro-batch of 450 tokens fits beside the states of both models"):
        train(RLHFUSE, models, 64, 450)


def test_the_slowest_stage_has_the_layers_that_do_not_divide() -> None:
    """60 layers in 8 stages: 8 in the fullest."""
    role = Role("critic", LARGE, True)
    whole, stage = (turn_s(role, RLHFUSE, Parallelism(8, p, 4), 450, training=True) for p in (1, 8))
    assert 8 / 60 * whole < stage < 8.2 / 60 * whole
