"""A tiny model, and a `Bench` of it and its batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from functions.base.samples import Columns
from functions.exchange.directory import DirectoryExchange
from functions.weights.base import import_model
from tests.support.train_call import Bench, make_samples, save_tiny


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny(path, attention_dropout=0.5)
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
