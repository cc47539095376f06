"""A tiny model, and a `Bench` of it and its batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from functions.exchange.directory import DirectoryExchange
from functions.models import save_model
from functions.samples import Columns
from functions.weights.base import import_model
from tests.support.train_call import VOCABULARY, Bench, make_samples


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, attention_dropout=0.5, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_model(model, path)
    return path


@pytest.fixture
def bench(tmp_path: Path, directory: Path) -> Bench:
    exchange = DirectoryExchange(tmp_path / "exchange")
    import_model(exchange, "policy", directory)
    samples, columns = make_samples()
    # most tests want a batch without old log-probabilities
    token = {name: values for name, values in columns.token.items() if name != "old_logprobs"}
    return Bench(
        exchange, tmp_path / "scratch", directory, samples, Columns.of(samples, sample=columns.sample, token=token)
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
