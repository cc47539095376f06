"""A job of a mixture of experts, with turns: the rollout's choices go to training, or one line says why not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from functions.base.samples import SampleBatch
from functions.base.wire import WireError
from functions.exchange.base import ExchangeError
from functions.exchange.directory import DirectoryExchange
from tests.support.architectures import config_of
from tests.support.environment_job import SETTINGS, add_environment
from tests.support.tiny_job import Background, Job, here, make_job

WORDS = ["deterministic=false", "rollout.engine=transformers", "train.router_replay=R3", "steps=1"]


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Job:
    import torch
    from transformers import Qwen3MoeForCausalLM

    job = make_job(tmp_path_factory.mktemp("job"))
    add_environment(job)
    torch.manual_seed(0)
    ids = {"vocab_size": 15, "eos_token_id": 0, "pad_token_id": 1, "bos_token_id": None}
    Qwen3MoeForCausalLM(config_of("qwen3_moe", **ids)).save_pretrained(job.directory / "model")
    return job


def batches(run: Path) -> Iterator[SampleBatch]:
    """With experts, of those that lie in the exchange now."""
    exchange = DirectoryExchange(run)
    for key in exchange.list("calls/"):
        with suppress(WireError, ExchangeError):
            batch = SampleBatch.decode(exchange.get(key))
            if batch.experts is not None:
                yield batch


def test_experts_travel_with_samples(experts: Job, tmp_path: Path, leaks_nothing: None) -> None:
    """Of what the environment answered nobody says any."""
    run = tmp_path / "run"
    job = Background("run", experts.file, "--run-dir", run, *SETTINGS, *WORDS, "limits.attempts=1")
    found: list[SampleBatch] = []

    def second_turns() -> bool:
        found[:] = batches(run)
        return any(batch.turns.flat.max(initial=0) > 0 for batch in found)

    job.wait_for(second_turns)
    told, _ = job.process.communicate()
    assert job.process.returncode == 0, told
    for batch in found:
        chosen = batch.mask == 1
        assert batch.experts is not None
        assert batch.experts.shape == (len(chosen), 2, 2)
        assert (batch.experts[chosen] < 4).all()
        assert (batch.experts[~chosen] == 255).all()
    [last] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1:]
    assert last["rollout_corr/abs_diff_mean"] < 1e-5


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["rollout.engine=auto"], "train.router_replay: got 'auto' (wants rollout.engine = 'transformers', which says"),
        (["train.router_replay=R2"], "train.router_replay: should be 'disabled' or 'R3', got 'R2'"),
        (["recipe=sft"], "train.router_replay: got a recipe that samples nothing (wants rollout.engine"),
    ],
)
def test_refused_in_one_line(experts: Job, tmp_path: Path, words: list[str], line: str) -> None:
    done = here("run", experts.file, "--run-dir", tmp_path / "run", *WORDS, *words)
    assert line in done.stderr
    assert done.returncode != 0
    assert not (tmp_path / "run").exists()


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job")
    done = here("run", job.file, "--run-dir", tmp_path / "run", *WORDS)
    assert "train.router_replay: the model is of type 'llama' (wants experts whose routing is known: qwen3_moe)" in (
        done.stderr
    )
