"""Models and settings that vLLM cannot serve: one line each."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from functions.base.wire import Version
from functions.exchange.base import Corrupt
from functions.exchange.directory import DirectoryExchange
from functions.generate.vllm.engine import VllmEngine
from functions.generate.vllm.start import VllmSettings
from functions.weights.base import import_model
from functions.weights.materialize import materialize
from tests.vllm.samples import CONTEXT, edit_config

pytestmark = pytest.mark.vllm


@pytest.fixture
def model(make_model: Callable[..., Path], tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    shutil.copytree(make_model(60), directory)
    return directory


def load(model: Path, **settings: Any) -> str:
    """The message of the ValueError that loading ends with."""
    engine = VllmEngine(VllmSettings(**settings))
    with pytest.raises(ValueError) as caught:
        engine.load(Version("policy", 0), model)
    engine.close()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_model_that_vllm_does_not_know(model: Path) -> None:
    edit_config(model, architectures=["XlmWithLMHead"], model_type="xlm")
    assert 'vLLM has no XlmWithLMHead; engine = "transformers" would do' in load(model)


def test_a_model_that_nobody_knows(model: Path) -> None:
    edit_config(model, architectures=["OwnForCausalLM"], model_type="own")
    assert "vLLM has no OwnForCausalLM; transformers does not know it either" in load(model)


def test_a_head_size_that_vllm_has_no_kernel_for(make_model: Callable[..., Path]) -> None:
    message = load(make_model(61, hidden_size=64))
    assert "vLLM has no attention for heads of 16 on a CPU (it has 32, " in message


def test_a_context_longer_than_the_models(model: Path) -> None:
    assert f"context {2 * CONTEXT} is longer than the model's {CONTEXT} tokens" in load(model, context=2 * CONTEXT)


def test_too_little_memory_for_one_sample(model: Path) -> None:
    message = load(model, kv_cache_mb=1)
    assert f"too little memory for the KV cache: one sample of {CONTEXT} tokens needs" in message
    assert "lower context, or raise kv_cache_mb" in message


def test_a_cache_larger_than_the_machine(model: Path) -> None:
    assert "too little memory" in load(model, kv_cache_mb=1 << 30)


def test_weights_that_do_not_fit_the_configuration(model: Path) -> None:
    edit_config(model, hidden_size=256)
    assert "256" in load(model)


def test_a_directory_that_holds_no_model(tmp_path: Path) -> None:
    assert "no config.json" in load(tmp_path)


def test_a_version_whose_bytes_were_altered_is_not_loaded(model: Path, tmp_path: Path) -> None:
    exchange = DirectoryExchange(tmp_path / "exchange")
    version = import_model(exchange, "policy", model)
    shard = next(p for p in sorted((tmp_path / "exchange").rglob("*")) if p.is_file() and p.stat().st_size > 100_000)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(Corrupt, match="policy"):
        materialize(exchange, version, tmp_path / "version")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int8"}, "dtype 'int8': wants float32, bfloat16 or float16"),
        ({"context": 0}, "context is 0, wants 1 or more"),
        ({"memory_fraction": 1.5}, "memory_fraction is 1.5"),
        ({"lora_rank": 7}, "lora_rank is 7, wants 0 or one of 1, 8"),
    ],
)
def test_settings_are_checked_when_made(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VllmSettings(**settings)
