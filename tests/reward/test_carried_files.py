"""The user's code goes to functions that do not see the user's disk through the job's exchange."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from functions.call import userfile
from functions.call.function import FatalError
from functions.call.train_params import TrainParams
from functions.exchange.directory import DirectoryExchange
from orchestrator.base.errors import ConfigError
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.job.config import JobConfig, parse_job
from orchestrator.run.user_files import carry


def job(score: str, base: Path) -> JobConfig:
    table = {"name": "j", "steps": 1, "model": {"path": "m"}, "data": {"train": "t"}, "reward": {"score": score}}
    return parse_job(table, base=base)


def test_a_scorer_arrives_as_it_was_when_the_job_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "replica"))
    exchange = DirectoryExchange(str(tmp_path / "exchange"))
    file = tmp_path / "reward.py"
    file.write_text("def score(solution_str):\n    return 7\n")
    given = job("reward.py:score", tmp_path)
    ours = {"actor": TrainParams(advantage="grpo", loss="gspo", aggregation="seq-mean-token-mean", epochs=2)}
    told, settings = asyncio.run(carry(AsyncExchange(exchange), given, ours))
    file.unlink()
    assert settings == ours, "names of ours stay"
    userfile.carried_by(exchange.durable.get)
    assert isinstance(told.reward.score, str)
    assert userfile.load(told.reward.score)("x") == 7
    assert given.reward.score == f"{file}:score", "the job itself is as the user wrote it"


def test_losses_and_advantages_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "replica"))
    exchange = DirectoryExchange(str(tmp_path / "exchange"))
    (tmp_path / "own.py").write_text("def loss():\n    return 1\n\ndef advantage():\n    return 2\n")
    own = TrainParams(advantage=f"{tmp_path}/own.py:advantage", loss=f"{tmp_path}/own.py:loss")
    _, settings = asyncio.run(carry(AsyncExchange(exchange), job("rule:exact", tmp_path), {"critic": own}))
    userfile.carried_by(exchange.durable.get)
    assert [userfile.load(name)() for name in (settings["critic"].advantage, settings["critic"].loss)] == [2, 1]


@pytest.mark.parametrize("score", ["rule:exact", "model", "https://scorer.example/v1:run.py:x"])
def test_what_is_no_file_stays(score: str, tmp_path: Path) -> None:
    given = job("rule:exact", tmp_path)
    given = given.model_copy(update={"reward": given.reward.model_copy(update={"score": score})})
    told, _ = asyncio.run(carry(AsyncExchange(DirectoryExchange(str(tmp_path / "exchange"))), given, {}))
    assert told.reward.score == score


def test_files_that_are_not_there(tmp_path: Path) -> None:
    store = AsyncExchange(DirectoryExchange(str(tmp_path / "exchange")))
    with pytest.raises(ConfigError, match=r"reward\.score: .*missing\.py cannot be read: No such file"):
        asyncio.run(carry(store, job("missing.py:score", tmp_path), {}))
    userfile.carried_by(None)
    with pytest.raises(FatalError, match="has none"):
        userfile.load("exchange:files/0/a.py:x")


def test_a_file_that_was_altered_on_its_way_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the exchange, or (half written by a killed replica) on this machine's disk."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "replica"))
    exchange = DirectoryExchange(str(tmp_path / "exchange"))
    (tmp_path / "reward.py").write_text("def score(solution_str):\n    return 7\n")
    carried, _ = asyncio.run(carry(AsyncExchange(exchange), job("reward.py:score", tmp_path), {}))
    name = carried.reward.score
    assert isinstance(name, str)
    key = name.removeprefix(userfile.CARRIED).rpartition(":")[0]
    userfile.carried_by(exchange.durable.get)
    whole = exchange.get(key)
    exchange.put(key, whole.replace(b"7", b"9"))
    with pytest.raises(FatalError, match="was altered since the job was accepted"):
        userfile.load(name)
    exchange.put(key, whole)
    assert userfile.load(name)("x") == 7
    (kept,) = (tmp_path / "replica").rglob("reward.py")
    kept.write_bytes(whole[:10])
    assert userfile.load(name)("x") == 7
