"""Calls of the train function on a tiny model and a ragged batch: what its tests share."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from functions.base.samples import Columns, Finish, Ragged, SampleBatch
from functions.base.wire import Call, Json, Ref, Version
from functions.call.function import Context
from functions.exchange.base import Exchange
from functions.exchange.node import NodeExchange
from functions.models.pretrained import save_model
from functions.train.function import TrainFunction
from functions.weights.store import fetch
from tests.support.versions import fetch_state

VOCABULARY = 53
GROUPS, N = 4, 4
BASE = Version("policy", 0)
ADAM: dict[str, Any] = {"lr": 1e-2, "betas": [0.9, 0.99], "weight_decay": 0.1, "max_grad_norm": 0.5}


def save_tiny(path: Path, *, intermediate_size: int = 48, **config: Any) -> None:
    """A random two-layer Llama, the same each time, whose logits are far enough apart to train on."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=intermediate_size, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
            **config,
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    save_model(model, path)


@dataclasses.dataclass
class Bench:
    """An exchange with the base version and a batch, and calls on it."""

    exchange: Exchange
    scratch: Path
    directory: Path
    samples: SampleBatch
    columns: Columns
    node: NodeExchange | None = None

    def call(
        self,
        params: Json,
        *,
        id: str = "call-1",
        version: Version = BASE,
        function: TrainFunction | None = None,
        samples: list[SampleBatch] | None = None,
        columns: list[Columns] | None = None,
        context: Context | None = None,
    ) -> Json:
        given = [  # as if `version` had made them
            dataclasses.replace(b, version=np.full_like(b.version, version.number)) for b in samples or [self.samples]
        ]
        refs = {
            "samples": [self._put(f"s{i}", b.encode()) for i, b in enumerate(given)],
            "columns": [self._put(f"c{i}", c.encode()) for i, c in enumerate(columns or [self.columns])],
        }
        params = {"max_rollout_logprob_diff": "off", **params}  # nobody sampled these
        call = Call(id, "train", refs, {"policy": version}, params, step=7)
        events = list((function or TrainFunction(device="cpu")).call(call, context or self.context()))
        assert [e.kind for e in events] == ["done"]
        data: Json = json.loads(events[0].to_line())["data"]
        return data

    def context(self) -> Context:
        return Context(self.exchange, str(self.scratch), node=self.node)

    def weights(self, data: Json) -> dict[str, Tensor]:
        return fetch(self.exchange, Version.from_json(data["version"]))

    def state(self, data: Json) -> dict[str, Tensor]:
        return fetch_state(self.exchange, Version.from_json(data["version"]))

    def _put(self, name: str, data: bytes) -> Ref:
        return self.exchange.put(f"batches/{name}", data)


def make_samples(seed: int = 0) -> tuple[SampleBatch, Columns]:
    rng = np.random.default_rng(seed)
    base = SampleBatch.of_prompts(
        [rng.integers(3, VOCABULARY, k).tolist() for k in (3, 1, 5, 2)], samples_per_prompt=N, version=0
    )
    lengths = rng.integers(1, 12, GROUPS * N).astype(np.int32)
    lengths[5] = 0
    total = int(lengths.sum())
    mask = (rng.random(total) > 0.2).astype(np.float32)
    batch = SampleBatch(
        prompts=base.prompts, prompt=base.prompt, group=base.group, index=base.index,
        responses=Ragged(rng.integers(3, VOCABULARY, total).astype(np.int32), lengths),
        logprobs=np.log(rng.uniform(0.05, 0.5, total)).astype(np.float32), mask=mask,
        finish=np.full(GROUPS * N, Finish.STOP, np.int32), version=base.version,
    )  # fmt: skip
    scores = rng.random(GROUPS * N).astype(np.float32)
    scores[N : 2 * N] = 0.25  # a group without signal
    token = {name: rng.normal(-2, 0.5, total).astype(np.float32) for name in ("ref_logprobs", "old_logprobs", "values")}
    return batch, Columns.of(batch, sample={"score": scores}, token=token)


def close(one: dict[str, Tensor], two: dict[str, Tensor], atol: float) -> None:
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=atol)


def same_bits(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
