"""The journal: a chain that only one orchestrator can lengthen."""

import asyncio
from pathlib import Path

import pytest

from functions.base.wire import Json
from functions.exchange.directory import DirectoryExchange
from orchestrator.base.errors import Fenced, RunError
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.run.journal import Journal
from orchestrator.run.lease import take_lease


def store(path: Path) -> AsyncExchange:
    return AsyncExchange(DirectoryExchange(str(path)), patience_s=1)


async def grow(path: Path, steps: int) -> Journal:
    journal = await Journal.open(store(path))
    for step in range(steps):
        await journal.commit(history={"n": step}, pointers={"versions": {}}, observed={"s": 0.5})
    return journal


def test_reopened_it_has_every_record(tmp_path: Path) -> None:
    async def scenario() -> None:
        written = await grow(tmp_path, 3)
        again = await Journal.open(store(tmp_path))
        assert again.records == written.records
        assert [r.step for r in again.records] == [0, 1, 2]
        assert again.records[2].parent == again.records[1].checksum

    asyncio.run(scenario())


def test_what_was_only_observed_does_not_change_the_chain(tmp_path: Path) -> None:
    async def commit(path: Path, observed: Json) -> str:
        journal = await Journal.open(store(path))
        return (await journal.commit(history={"n": 1}, pointers={}, observed=observed)).checksum

    a = asyncio.run(commit(tmp_path / "a", {"s": 1.0}))
    assert a == asyncio.run(commit(tmp_path / "b", {"s": 2.0}))


def test_of_two_orchestrators_one_is_fenced(tmp_path: Path) -> None:
    async def scenario() -> None:
        first, second = await grow(tmp_path, 1), await Journal.open(store(tmp_path))
        await first.commit(history={"n": 1}, pointers={}, observed={"by": "first"})
        with pytest.raises(Fenced, match=r"journal/000001\.json: another orchestrator"):
            await second.commit(history={"n": 1}, pointers={}, observed={"by": "second"})
        assert (await Journal.open(store(tmp_path))).records[1].observed == {"by": "first"}

    asyncio.run(scenario())


def test_a_commit_that_was_tried_twice_counts_once(tmp_path: Path) -> None:
    """The store answered, the answer was lost: the second try finds its own value and is content."""

    async def scenario() -> None:
        first = await grow(tmp_path, 1)
        key, data = "journal/000001.json", b"{}"
        assert await store(tmp_path).put_if_absent(key, data) is not None
        assert await store(tmp_path).put_if_absent(key, data) is not None
        assert await store(tmp_path).put_if_absent(key, b"other") is None
        assert len(first.records) == 1

    asyncio.run(scenario())


def test_an_altered_record_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        await grow(tmp_path, 3)
        exchange = DirectoryExchange(str(tmp_path))
        exchange.put("journal/000001.json", exchange.get("journal/000001.json").replace(b'"n": 1', b'"n": 7'))
        with pytest.raises(RunError, match=r"journal/000002\.json: does not follow"):
            await Journal.open(store(tmp_path))

    asyncio.run(scenario())


def test_each_execution_has_an_epoch_of_its_own(tmp_path: Path) -> None:
    async def scenario() -> None:
        assert [await take_lease(store(tmp_path), f"h{i}") for i in range(3)] == [1, 2, 3]
        epochs = await asyncio.gather(*(take_lease(store(tmp_path), f"r{i}") for i in range(4)), return_exceptions=True)
        won = [e for e in epochs if isinstance(e, int)]
        assert len(won) == len(set(won))
        assert all(isinstance(e, Fenced) for e in epochs if not isinstance(e, int))

    asyncio.run(scenario())
