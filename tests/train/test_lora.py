"""LoRA: only adapters train and move; merged, they are the model that was trained."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from functions.base.samples import Columns, Ragged, SampleBatch
from functions.base.wire import Call, Json, Version
from functions.call.function import Context, FatalError
from functions.exchange.directory import DirectoryExchange
from functions.models.lora import add_adapters
from functions.models.pretrained import load_causal_lm, save_model
from functions.reference.function import ReferenceFunction
from functions.train.function import TrainFunction
from functions.weights.adapters import write_adapter
from functions.weights.base import import_model
from functions.weights.manifest import keep_only, read_manifest
from functions.weights.materialize import materialize
from functions.weights.store import fetch
from tests.support.versions import fetch_state

BASE = Version("policy", 0)
LORA: Json = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "down_proj"]}
PARAMS: Json = {"optimizer": {"lr": 5e-2}, "lora": LORA, "max_rollout_logprob_diff": "off"}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def exchange(tmp_path: Path, request: pytest.FixtureRequest) -> DirectoryExchange:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    save_model(nn.Module.to(model, request.param), tmp_path / "model")
    exchange = DirectoryExchange(tmp_path / "exchange")
    import_model(exchange, "policy", tmp_path / "model")
    return exchange


@pytest.fixture
def samples() -> SampleBatch:
    rng = np.random.default_rng(0)
    base = SampleBatch.of_prompts([[3, 4], [5, 6, 7]], samples_per_prompt=4, version=0)
    responses = Ragged.from_rows([rng.integers(3, 50, k).tolist() for k in rng.integers(2, 9, 8)], np.int32)
    total = len(responses.flat)
    return SampleBatch(
        base.prompts, base.prompt, base.group, base.index, responses, np.full(total, -3.9, np.float32),
        np.ones(total, np.float32), np.ones(8, np.int32), base.version,
    )  # fmt: skip


def train(
    exchange: DirectoryExchange, tmp_path: Path, samples: SampleBatch, params: Json, version: Version, id: str,
    function: TrainFunction | None = None,
) -> Version:  # fmt: skip
    """On the samples as if `version` had made them."""
    samples = replace(samples, version=np.full_like(samples.version, version.number))
    scores = Columns.of(samples, sample={"score": np.linspace(0, 1, 8, dtype=np.float32)})
    inputs = {
        "samples": [exchange.put(f"b{version.number}", samples.encode())],
        "columns": [exchange.put("c", scores.encode())],
    }
    call = Call(id, "train", inputs, {"policy": version}, params)
    (event,) = (function or TrainFunction(device="cpu")).call(call, Context(exchange, str(tmp_path / "scratch")))
    return Version.from_json(event.data["version"])


def reference(exchange: DirectoryExchange, tmp_path: Path, samples: SampleBatch, version: Version) -> Tensor:
    call = Call("r", "logprobs", {"samples": [exchange.put("b", samples.encode())]}, {"model": version})
    (event,) = ReferenceFunction(device="cpu").call(call, Context(exchange, str(tmp_path / "scratch")))
    assert event.ref is not None
    return torch.from_numpy(Columns.decode(exchange.get(event.ref)).token["ref_logprobs"].copy())


def test_only_adapters_move_and_merge_into_what_was_trained(
    exchange: DirectoryExchange, tmp_path: Path, samples: SampleBatch
) -> None:
    function, version = TrainFunction(device="cpu"), BASE
    for step in range(3):
        version = train(exchange, tmp_path, samples, PARAMS, version, f"s{step}", function)
    adapters = fetch(exchange, version)
    assert len(adapters) == 2 * 3 * 2
    assert adapters["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"].shape == (32, 4)
    assert {t.dtype for t in adapters.values()} == {torch.float32}
    assert {n.split("/", 1)[1].rsplit(".", 1)[1] for n in fetch_state(exchange, version)} == {"lora_A", "lora_B"}
    assert read_manifest(exchange, version).size_bytes < 0.5 * read_manifest(exchange, BASE).size_bytes
    # by hand: W + 2 B A for the targets, every other tensor as it was
    merged = load_file(materialize(exchange, version, tmp_path / "merged") / "model.safetensors")
    changed = 0
    for name, tensor in fetch(exchange, BASE).items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{layer}.lora_A.weight" in adapters:
            low, high = adapters[f"{layer}.lora_A.weight"], adapters[f"{layer}.lora_B.weight"]
            tensor = (tensor.float() + 2.0 * high @ low).to(tensor.dtype)
            changed += 1
        torch.testing.assert_close(
            merged[name], tensor, rtol=1e-6, atol=1e-6 if tensor.dtype == torch.float32 else 8e-3
        )
    assert changed == 6
    # and the trainer's own model says what the merged one says
    held = function._held
    assert held is not None
    own = load_causal_lm(tmp_path / "merged")
    tokens = torch.tensor([[3, 4, 5, 9, 8]])
    held.model.set_attn_implementation("sdpa")
    with torch.no_grad():
        same = torch.allclose(
            held.model(tokens).logits, own(tokens).logits, atol=1e-5 if own_is_exact(merged) else 2e-2
        )
    assert same
    moved = (reference(exchange, tmp_path, samples, version) - reference(exchange, tmp_path, samples, BASE)).abs()
    assert float(moved.max()) > 0.05


def own_is_exact(merged: dict[str, Tensor]) -> bool:
    return next(iter(merged.values())).dtype == torch.float32


def test_warm_and_cold_give_the_same_bits_and_retention_keeps_the_base(
    exchange: DirectoryExchange, tmp_path: Path, samples: SampleBatch
) -> None:
    ends = []
    for kind in ("warm", "cold"):
        warm, version = TrainFunction(device="cpu"), BASE
        for step in range(2):
            version = train(
                exchange, tmp_path, samples, PARAMS, version, f"{kind}{step}", warm if kind == "warm" else None
            )
        ends.append(version)
    one, two = (fetch(exchange, v) | fetch_state(exchange, v) for v in ends)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    keep_only(exchange, "policy", [ends[1]])
    materialize(exchange, ends[1], tmp_path / "kept")


def test_fresh_adapters_change_nothing_and_start_by_their_layers_names() -> None:
    torch.manual_seed(1)
    layer, states = nn.Linear(8, 6), torch.randn(3, 8)
    models = [nn.Sequential(OrderedDict([(name, nn.Linear(8, 6))])) for name in ("x", "x", "y")]
    starts = []
    for model in models:
        model[0].load_state_dict(layer.state_dict())
        name = next(name for name, _ in model.named_children())
        add_adapters(model, rank=2, alpha=4.0, targets=[name])
        assert torch.equal(model(states), layer(states))
        starts.append(dict(model.named_parameters())[f"{name}.lora_A.default.weight"])
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])


def test_peft_reads_what_a_trainer_has_published(
    exchange: DirectoryExchange, tmp_path: Path, samples: SampleBatch
) -> None:
    """By its own loader, from the directory that vLLM gets too: the model says what the merged one says."""
    from peft import PeftModel

    version = train(exchange, tmp_path, samples, PARAMS, BASE, "s0")
    base = materialize(exchange, BASE, tmp_path / "base")
    files = write_adapter(exchange, read_manifest(exchange, version), tmp_path / "adapter", str(base))
    model = PeftModel.from_pretrained(load_causal_lm(base), files)
    own = load_causal_lm(materialize(exchange, version, tmp_path / "merged"))
    tokens = torch.tensor([[3, 4, 5, 9, 8]])
    with torch.no_grad():
        got, plain, wanted = model(tokens).logits, load_causal_lm(base)(tokens).logits, own(tokens).logits
    exact = read_manifest(exchange, BASE).tensors[0].dtype == "F32"  # else the merged weights were rounded
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5 if exact else 2e-2)
    assert (got - plain).abs().max() > 0.1, "one step has moved them"


def test_bad_lora_settings_are_named(exchange: DirectoryExchange, tmp_path: Path, samples: SampleBatch) -> None:
    with pytest.raises(FatalError, match=r"linear layers are down_proj, gate_proj.*q_proj"):
        train(exchange, tmp_path, samples, {"lora": LORA | {"targets": ["c_attn"]}}, BASE, "a")
    with pytest.raises(FatalError, match="lora: adapters are for the policy"):
        train(exchange, tmp_path, samples, {"lora": LORA, "objective": "value", "advantage": "gae"}, BASE, "b")
    version = train(exchange, tmp_path, samples, PARAMS, BASE, "c")
    with pytest.raises(FatalError, match=r"rank 4, alpha 8.0.*params.lora wants 2"):
        train(exchange, tmp_path, samples, {"lora": LORA | {"rank": 2}}, version, "d")
