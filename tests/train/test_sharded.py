"""A gang's model that no rank ever held whole is the model that one replica loads, to the bit. Gangs of one rank, in
this process; tests/train/test_gang.py and test_parts.py have larger ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from functions.base.samples import Finish, Ragged, SampleBatch
from functions.call.function import Context
from functions.exchange.base import Exchange
from functions.exchange.directory import DirectoryExchange
from functions.models.forward import SHARED_ARCHITECTURES, output_head
from functions.models.lora import add_adapters
from functions.models.packing import Pack, make_packs
from functions.models.pretrained import load_causal_lm, load_critic
from functions.train.gang import GangParams, Ranks, meet
from functions.train.parallel import Forward
from functions.train.sharded import Weights, sharded_model
from functions.weights.base import import_model
from functions.weights.manifest import read_manifest
from tests.support.architectures import VOCABULARY, tiny_model

CPU = torch.device("cpu")
OTHERWISE_STORED = {"qwen3_moe"}
"""Its checkpoint has each expert apart."""
_attempts = itertools.count()


@contextmanager
def gang_of_one(exchange: Exchange, scratch: Path) -> Iterator[tuple[Context, Ranks]]:
    context = Context(exchange, str(scratch))
    with meet(GangParams(id="g", attempt=f"a{next(_attempts)}", size=1, rank=0), CPU, context, lambda: False) as ranks:
        assert ranks is not None
        yield context, ranks


def nothing(_model: PreTrainedModel) -> None:
    return None


def adapters(model: PreTrainedModel) -> None:
    add_adapters(model, rank=2, alpha=4.0, targets=["q_proj", "down_proj"])


def a_pack() -> Pack:
    rng = np.random.default_rng(0)
    base = SampleBatch.of_prompts([[3, 4, 5], [6]], samples_per_prompt=2, version=0)
    lengths = np.array([3, 5, 1, 4], np.int32)
    samples = SampleBatch(
        prompts=base.prompts, prompt=base.prompt, group=base.group, index=base.index,
        responses=Ragged(rng.integers(3, VOCABULARY, 13).astype(np.int32), lengths), logprobs=np.zeros(13, np.float32),
        mask=np.ones(13, np.float32), finish=np.full(4, Finish.STOP, np.int32), version=base.version,
    )  # fmt: skip
    (pack,) = make_packs(samples, range(4), budget_tokens=1000, shared=True)
    return pack


def assert_same_model(sharded: Forward, whole: Forward) -> None:
    """Parameters, buffers and what comes out of them."""
    ours, theirs = dict(sharded.model.named_parameters()), dict(whole.model.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        assert isinstance(parameter, DTensor)
        assert parameter.requires_grad == theirs[name].requires_grad
        assert parameter.dtype == theirs[name].dtype
        assert torch.equal(parameter.full_tensor(), theirs[name]), name
    buffers = dict(whole.model.named_buffers())
    assert dict(sharded.model.named_buffers()).keys() == buffers.keys()
    for name, buffer in sharded.model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    with torch.no_grad():
        for one, two in zip(sharded(a_pack(), 0.7), whole(a_pack(), 0.7), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", sorted(SHARED_ARCHITECTURES))
def test_each_architecture_is_read_into_its_shards(kind: str, tmp_path: Path) -> None:
    exchange = DirectoryExchange(tmp_path / "exchange")
    version = import_model(exchange, "policy", tiny_model(kind, tmp_path / "model"))
    weights = Weights(read_manifest(exchange, version), True, torch.float32, ())
    with gang_of_one(exchange, tmp_path / "scratch") as (context, ranks):
        forward = sharded_model(weights, nothing, context, tmp_path / "scratch" / "files", CPU, ranks, {})
        if kind in OTHERWISE_STORED:
            assert forward is None
            return
        assert forward is not None
        whole = load_causal_lm(tmp_path / "model")
        assert_same_model(forward, Forward(whole, output_head(whole)))


@pytest.mark.parametrize(
    ("policy", "adapt", "dtype"),
    [(False, nothing, torch.float32), (True, adapters, torch.float32), (True, adapters, torch.bfloat16)],
    ids=["critic", "lora", "lora-bfloat16"],
)
def test_critics_and_adapters(
    policy: bool, adapt: Callable[[PreTrainedModel], None], dtype: torch.dtype, tmp_path: Path
) -> None:
    """A critic's new `score` is zero; adapters start as they do beside whole weights."""
    exchange = DirectoryExchange(tmp_path / "exchange")
    version = import_model(exchange, "policy", tiny_model("qwen2", tmp_path / "model"))
    weights = Weights(read_manifest(exchange, version), policy, dtype, ())
    with gang_of_one(exchange, tmp_path / "scratch") as (context, ranks):
        forward = sharded_model(weights, adapt, context, tmp_path / "scratch" / "files", CPU, ranks, {})
        assert forward is not None
        whole = (load_causal_lm if policy else load_critic)(tmp_path / "model", dtype=dtype)
        head = output_head(whole) if policy else None
        adapt(whole)
        assert_same_model(forward, Forward(whole, head))
