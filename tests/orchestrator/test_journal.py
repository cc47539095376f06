"""The journal: a chain that only one orchestrator can lengthen."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from functions.base.wire import Json
from functions.exchange.directory import DirectoryExchange
from orchestrator.base.errors import Fenced, RunError
from orchestrator.base.outages import Outages
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.job.config import parse_job
from orchestrator.run.identity import FOLLOWED, RunIdentity, is_held_by, take_lease
from orchestrator.run.journal import Journal


def store(path: Path) -> AsyncExchange:
    return AsyncExchange(DirectoryExchange(str(path)), outages=Outages(1))


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


OURS = RunIdentity("a1", "here:/runs/a", dict.fromkeys(FOLLOWED, "0"))


def test_each_execution_has_an_epoch_of_its_own(tmp_path: Path) -> None:
    async def scenario() -> None:
        assert [await take_lease(store(tmp_path), OURS, f"h{i}") for i in range(3)] == [1, 2, 3]
        races = (take_lease(store(tmp_path), OURS, f"r{i}") for i in range(4))
        epochs = await asyncio.gather(*races, return_exceptions=True)
        won = [e for e in epochs if isinstance(e, int)]
        assert len(won) == len(set(won))
        assert all(isinstance(e, Fenced) for e in epochs if not isinstance(e, int))

    asyncio.run(scenario())


def test_a_stranger_is_refused_in_a_line_that_names_both(tmp_path: Path) -> None:
    stranger = replace(OURS, id="b2", where="there:/runs/b")

    async def scenario() -> None:
        line = r"holds run a1 \(here:/runs/a\), and this is run b2 \(there:/runs/b\)"
        assert not is_held_by(DirectoryExchange(str(tmp_path)), OURS), "nobody's yet"
        await take_lease(store(tmp_path), OURS, "h")
        assert is_held_by(DirectoryExchange(str(tmp_path)), OURS)
        assert not is_held_by(DirectoryExchange(str(tmp_path)), stranger)
        with pytest.raises(RunError, match=line):
            await take_lease(store(tmp_path), stranger, "s")
        journal = await Journal.open(store(tmp_path), OURS)
        await journal.commit(history={}, pointers={"versions": {}}, observed={})
        with pytest.raises(RunError, match=line):  # its leases are lost, its journal is not
            await Journal.open(store(tmp_path), stranger)
        assert (await Journal.open(store(tmp_path), OURS)).records == journal.records

    asyncio.run(scenario())


def test_whose_it_is_does_not_change_the_history(tmp_path: Path) -> None:
    async def first(path: Path, run: RunIdentity) -> str:
        return (
            await (await Journal.open(store(path), run)).commit(history={"n": 1}, pointers={}, observed={})
        ).checksum

    assert asyncio.run(first(tmp_path / "a", OURS)) == asyncio.run(first(tmp_path / "b", replace(OURS, id="c3")))


TABLE = {"name": "j", "steps": 1, "model": {"path": "m"}, "data": {"train": "t"}}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 1}, "seed"), ({"recipe": "rloo"}, "recipe"), ({"train": {"lr": 0.5}}, "train"),
        ({"rollout": {"n": 3}}, "rollout"), ({"algorithm": {"kl": {"coef": 0.1}}}, "algorithm"),
        ({"model": {"path": "m", "lora_rank": 2}, "deterministic": True}, "deterministic, model"),
        ({"steps": 9}, None), ({"model": {"path": "elsewhere"}}, None), ({"rollout": {"slots": 3}}, None),
        ({"limits": {"attempts": 9}}, None), ({"functions": {"generate": {"replicas": 2}}}, None),
    ],
)  # fmt: skip
def test_a_job_goes_on_as_it_began(change: Json, told: str | None, tmp_path: Path) -> None:
    began, now = (RunIdentity.of("a", "h:/r", parse_job(TABLE | c, base=tmp_path)) for c in ({}, change))
    if told is None:
        now.check(began)
    else:
        with pytest.raises(RunError, match=f"^h:/r/job.toml: {told} is not what the run began with"):
            now.check(began)
