"""Pipelines of real processes over gloo: the stages make the step of one rank, and publish what it would."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from functions.base.wire import Call, Json, Version
from functions.call.parallel import Parallel
from functions.train.pipeline import Item, one_f_one_b
from functions.weights.base import import_model
from tests.support.architectures import tiny_model
from tests.support.gang import ranks_of, run_gangs
from tests.train.test_gang import GRPO, VALUE, Bench, assert_equal_step, bench

__all__ = ["bench"]
pytestmark = pytest.mark.timeout(300)

TWO_STEPS: Json = {"epochs": 1, "mini_batches": 2, "kl": {"where": "loss", "kind": "k3", "coef": 0.3}}


def deep(kind: str) -> Json:
    """Changes that make a tiny model one of four layers."""
    return {"num_hidden_layers": 4} | (
        {"layer_types": ["sliding_attention", "full_attention"] * 2} if kind == "gemma3_text" else {}
    )


@dataclass(frozen=True)
class Case:
    kind: str
    size: int
    parallel: Parallel
    params: Json = field(default_factory=dict)


CASES = {
    "tied": Case("gemma3_text", 4, Parallel(pp=4), GRPO),
    "dp-and-pp": Case("qwen3", 4, Parallel(pp=2), GRPO | TWO_STEPS),
    "experts": Case("qwen3_moe", 2, Parallel(pp=2), GRPO),
    "critic": Case("llama", 2, Parallel(pp=2), VALUE),
    "tp-and-pp": Case("llama", 4, Parallel(tp=2, pp=2), GRPO | TWO_STEPS),
    "tied-tp-and-pp": Case("gemma3_text", 4, Parallel(tp=2, pp=2), GRPO),
    "adapters": Case(
        "qwen2", 2, Parallel(pp=2), GRPO | {"lora": {"rank": 4, "alpha": 8.0}, "gradient_checkpointing": True}
    ),
}


def test_stages_make_the_step_of_one(bench: Bench) -> None:
    """Each in turn on the same four processes; the last goes on from what four stages of a tied model published."""
    calls: list[tuple[Call, Case]] = []
    for name, case in CASES.items():
        base = import_model(bench.exchange, name, tiny_model(case.kind, bench.scratch / name, **deep(case.kind)))
        calls.append((bench.call(f"many-{name}", case.params | {"model": name}, base), case))
    tied = Version("tied", 1, hashlib.sha256(b"many-tied").hexdigest()[:12])
    again = Case("gemma3_text", 4, Parallel(pp=2), GRPO)
    calls.append((bench.call("many-again", again.params | {"model": "tied"}, tied), again))
    ended = run_gangs(bench.root, bench.scratch, [ranks_of(call, case.size, case.parallel) for call, case in calls])
    for (call, case), ranks in zip(calls, ended, strict=True):
        first, *others = [rank.data for rank in ranks]
        assert all(other == first for other in others)
        one = bench.alone(replace(call, id=call.id.replace("many", "one")))
        assert_equal_step(bench, one, first, in_order=False)
        assert first["stats"]["ranks"] == case.size


def of_both(bench: Bench) -> tuple[Call, Call, Call]:
    """A call that trains actor and critic, and one of each."""
    base = {
        name: import_model(bench.exchange, name, tiny_model(kind, bench.scratch / name, **deep(kind)))
        for name, kind in (("actor", "gemma3_text"), ("critic", "qwen3"))
    }
    policy = GRPO | {"model": "actor", "mini_batches": 2, "micro_batch_tokens": 12}
    value = VALUE | {"micro_batch_tokens": 12}
    actor, critic = bench.call("actor", policy, base["actor"]), bench.call("critic", value, base["critic"])
    weights = {"policy": base["actor"], "beside": base["critic"]}
    return replace(actor, id="both", weights=weights, params={**actor.params, "beside": value}), actor, critic


def test_actor_and_critic_in_one_schedule_make_the_steps_of_one_after_the_other(bench: Bench) -> None:
    """Two stages of both, after a kill, which leaves no version of either; four; and two of two ranks each."""
    call, *each = of_both(bench)
    (killed,) = run_gangs(bench.root, bench.scratch, [ranks_of(call, 2, Parallel(pp=2))], die=1)
    assert killed[1].exit_code == -9
    assert not [key for name in ("actor", "critic") for key in bench.exchange.list(f"weights/{name}/v000001")]
    calls = [ranks_of(call, 2, Parallel(pp=2)), ranks_of(replace(call, id="four"), 4, Parallel(pp=4))]
    few = {"micro_batch_tokens": 40}  # which cost most where tp divides them, too
    divided = {**call.params, **few, "beside": {**call.params["beside"], **few}}
    calls.append(ranks_of(replace(call, id="divided", params=divided), 4, Parallel(tp=2, pp=2)))
    gangs = run_gangs(bench.root, bench.scratch, calls)
    actor, critic = map(bench.alone, each)
    for ranks in gangs:
        first, *others = [rank.data for rank in ranks]
        assert all(other == first for other in others)
        assert_equal_step(bench, actor, first, in_order=False)
        assert_equal_step(bench, critic, first["beside"], in_order=False)
        assert 1 < first["stats"]["held_micro_batches"] <= len(ranks) + 1


@pytest.mark.gpu
def test_actor_and_critic_in_one_schedule_over_nccl(bench: Bench) -> None:
    """Two stages of both, each rank on a device of its own; float32 sums in another order than a CPU's."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"fused pipelines over NCCL want 2 CUDA devices; here are {torch.cuda.device_count()}")
    call, *each = of_both(bench)
    (ended,) = run_gangs(bench.root, bench.scratch, [ranks_of(call, 2, Parallel(pp=2))], device="cuda")
    actor, critic = map(bench.alone, each)
    for rank in ended:
        for one, many in ((actor, rank.data), (critic, rank.data["beside"])):
            assert_equal_step(bench, one, many, in_order=False, atol=1e-3)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 1), (4, 4), (4, 9)])
def test_1f1b_holds_no_more_than_the_stages_that_follow(stages: int, micro_batches: int) -> None:
    for stage, order in enumerate(one_f_one_b(stages, micro_batches)):
        held = np.cumsum([-1 if item.backward else 1 for item in order])
        assert held.max() == min(stages - stage, micro_batches)
        assert sorted(order) == sorted(Item(0, k, back) for k in range(micro_batches) for back in (False, True))


def test_a_model_without_split_points_is_refused_in_one_line(bench: Bench) -> None:
    base = import_model(bench.exchange, "gpt2", tiny_model("gpt2", bench.scratch / "gpt2"))
    calls = [bench.call("gpt2", GRPO | {"model": "gpt2"}, base), bench.call("deep", GRPO)]
    found = [run_gangs(bench.root, bench.scratch, [ranks_of(call, 4, Parallel(pp=4))])[0] for call in calls]
    told = [{rank.event.data["message"] for rank in ranks if rank.event is not None} for ranks in found]
    assert [len(messages) for messages in told] == [1, 1]
    assert "GPT2LMHeadModel has no split points: it is not divided by pp" in told[0].pop()
    assert "LlamaForCausalLM has 2 layers: they are not divided into 4 stages" in told[1].pop()
