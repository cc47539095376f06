"""Models divided over the ranks of one replica say what whole ones say; lost ranks."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from functions.base.samples import Columns
from functions.base.wire import Call, Load
from functions.call.function import Context, FatalError, RetryableError
from functions.exchange.directory import DirectoryExchange
from functions.models.pretrained import load_critic, save_model, score_head
from functions.models.team import Member, Team
from functions.reference.function import ReferenceFunction
from functions.reward.model import RewardModel, hold
from functions.reward.scorer import Item, Scored
from functions.weights.base import import_model
from tests.support.architectures import VOCABULARY, tiny_model
from tests.support.gang_bench import ragged_batch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KINDS = ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma3_text")
ASKED: Mapping[str, Mapping[str, Any]] = {
    "logprobs": {"temperature": 0.7, "micro_batch_tokens": 40}, "values": {"micro_batch_tokens": 40},
    "teacher": {"top_k": 5},
}  # fmt: skip


def critic(kind: str, path: Path) -> Path:
    """With a score that was trained."""
    model = load_critic(tiny_model(kind, path / f"{kind}-causal"))
    torch.manual_seed(1)
    with torch.no_grad():
        score_head(model).weight.normal_()
    save_model(model, path / f"{kind}-critic")
    return path / f"{kind}-critic"


def test_what_two_ranks_say_is_what_one_says(tmp_path: Path) -> None:
    """Of every shape log-probabilities, the most probable tokens and a critic's values; also after a park, and after a
    rank that was killed, which the next call starts anew."""
    exchange = DirectoryExchange(tmp_path / "exchange")
    _, inputs = ragged_batch(exchange, VOCABULARY, 9)
    versions = {kind: import_model(exchange, kind, tiny_model(kind, tmp_path / kind)) for kind in KINDS}
    critics = {kind: import_model(exchange, f"{kind}-critic", critic(kind, tmp_path)) for kind in KINDS}
    one, two = ReferenceFunction(device="cpu"), ReferenceFunction(device="cpu", tp=2)

    def said(function: ReferenceFunction, what: str, kind: str) -> dict[str, np.ndarray[Any, Any]]:
        operation, version = ("values", critics[kind]) if what == "values" else ("logprobs", versions[kind])
        call = Call("c", operation, {"samples": inputs["samples"]}, {"model": version}, ASKED[what])
        (done,) = function.call(call, Context(exchange, str(tmp_path / f"scratch-{id(function)}")))
        assert done.ref is not None
        return dict(Columns.decode(exchange.get(done.ref)).token)

    try:
        for kind in KINDS:
            for what in ASKED:
                whole, divided = said(one, what, kind), said(two, what, kind)
                assert whole.keys() == divided.keys()
                for name in whole:
                    np.testing.assert_allclose(divided[name], whole[name], rtol=0, atol=1e-5, err_msg=f"{kind} {what}")
                assert float(np.ptp(next(iter(whole.values())))) > 0.1
        held = two._team.member.held
        parts = {name: p for (_, _), one_held in held.items() for name, p in one_held.model.named_parameters()}
        divided_rows = parts["model.layers.0.self_attn.q_proj.weight"].to_local().shape[0]
        assert divided_rows == parts["model.layers.0.self_attn.q_proj.weight"].shape[0] // 2
        two.park()
        two.unpark()
        said(two, "values", "gemma3_text")
        with pytest.raises(RetryableError, match="a rank of 2 is lost"):
            two._team(lost)
        said(two, "values", "gemma3_text")
    finally:
        two.close()


def lost(_: Member) -> None:
    """Rank 1 is killed, rank 0 waits for it."""
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.all_reduce(torch.zeros(1))


def test_a_reward_model_on_two_ranks_scores_as_on_one(tmp_path: Path) -> None:
    directory = critic("qwen3", tmp_path)
    rng = np.random.default_rng(0)
    items = [
        Item(0, i, "", "", "", {}, *(rng.integers(3, VOCABULARY, k).astype(np.int32) for k in (n, n + 2)))
        for i, n in enumerate((3, 9, 1, 5))
    ]
    found = []
    for size in (1, 2):
        team = Team(size, torch.device("cpu"))
        try:
            team(hold, directory, torch.float32)
            results = RewardModel("judge", team, None, 20, lambda: None).score(items)
            found.append([result.numbers["score"] for result in results if isinstance(result, Scored)])
        finally:
            team.close()
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-5)
    assert len(found[0]) == 4


def test_heads_that_do_not_divide_are_refused_in_one_line(tmp_path: Path) -> None:
    exchange = DirectoryExchange(tmp_path / "exchange")
    version = import_model(exchange, "odd", tiny_model("llama", tmp_path / "odd", num_key_value_heads=1))
    function = ReferenceFunction(device="cpu", tp=2)
    try:
        with pytest.raises(FatalError, match=r"tp: got 2, does not divide the model's num_key_value_heads, which is 1"):
            function.load_ahead(Load("logprobs", {"model": version}), Context(exchange, str(tmp_path / "scratch")))
    finally:
        function.close()
