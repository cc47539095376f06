"""A directory and its copy: whatever two writers do, and wherever one of them is killed, all copies become equal."""

from __future__ import annotations

import importlib
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from functions.exchange.base import Exchange, Unavailable
from functions.exchange.open import open_exchange
from orchestrator.base.errors import Fenced, RunError
from orchestrator.run.changes import tree
from orchestrator.run.mirror import RUNNER, Mirror, Overtaken
from tests.exchange.conftest import credentials, moto_server, redis_server  # noqa: F401  # fixtures
from tests.exchange.servers import MotoServer, RedisServer

mirror = importlib.import_module("orchestrator.run.mirror")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at which a test meets every branch; and no file's time is trusted."""
    for name, size in {"INLINE_BYTES": 300, "CHANGE_BYTES": 900, "PIECE_BYTES": 128, "BLOCK_BYTES": 64}.items():
        monkeypatch.setattr(mirror, name, size)


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Exchange]:
    kind, name = getattr(request, "param", "directory"), tmp_path.name
    if kind == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        url = server.url
    elif kind == "s3":
        moto: MotoServer = request.getfixturevalue("moto_server")
        use: Callable[[MotoServer], None] = request.getfixturevalue("credentials")
        use(moto)
        url = f"s3://bucket/{name}?endpoint={moto.endpoint}"
    else:
        url = f"dir://{tmp_path}/store"
    exchange = open_exchange(url, name).durable
    yield exchange
    exchange.delete("")


class Dies(Exception):
    pass


class Dying:
    """An exchange whose user is killed at the `left`-th use that changes it: before it, or after it."""

    def __init__(self, exchange: Exchange, left: int, *, after: bool) -> None:
        self._exchange, self.left, self._after = exchange, left, after

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._exchange, name)
        if name not in ("put", "put_if_absent", "delete"):
            return method

        def dying(*args: Any, **named: Any) -> Any:
            self.left -= 1
            if self.left == 0 and not self._after:
                raise Dies
            made = method(*args, **named)
            if self.left == 0:
                raise Dies
            return made

        return dying


def copy(store: Exchange | Dying, directory: Path, by: str) -> Mirror:
    directory.mkdir(exist_ok=True)
    exchange: Any = store
    return Mirror(exchange, "run/a", directory, by=by, apart=lambda path: path.startswith("samples/"))


def files(of: Mirror) -> dict[str, bytes]:
    of.fetch()
    return {path: (of.directory / path).read_bytes() for path in tree(of.directory)}


def change(dice: random.Random, directory: Path, own: str) -> None:
    """A file of this writer's grows, is overwritten, cut, replaced or removed."""
    name = own + dice.choice("pqrs") if dice.random() < 0.8 else f"samples/{own}{dice.randrange(3)}"
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    match dice.choice(["grow", "grow", "within", "replace", "remove"]):
        case "grow":
            with path.open("ab") as file:
                file.write(dice.randbytes(dice.randrange(200)))
        case "within" if path.exists():
            with path.open("r+b") as file:
                file.seek(dice.randrange(path.stat().st_size + 1))
                file.write(dice.randbytes(50))
                file.truncate()
        case "replace":
            (directory / ".new").write_bytes(dice.randbytes(dice.randrange(1000)))
            os.replace(directory / ".new", path)
        case "remove":
            path.unlink(missing_ok=True)


@pytest.mark.parametrize(("store", "rounds"), [("directory", 500), ("redis", 500), ("s3", 110)], indirect=["store"])
@pytest.mark.parametrize("seed", range(2))
def test_copies_become_equal(store: Exchange, rounds: int, seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    one, two = copy(store, tmp_path / "one", f"{RUNNER}1"), copy(store, tmp_path / "two", "api")
    one.push(begins=True)
    for _ in range(rounds):
        for _ in range(dice.randrange(3)):
            change(dice, one.directory, "a")
        if dice.random() < 0.3:
            change(dice, two.directory, "b")
        match dice.randrange(4):
            case 0 | 1:
                one.push()
            case 2:
                two.push()
            case 3:
                two.pull()
    time.sleep(mirror.SETTLED_S)
    one.push(whole=seed == 0)
    two.push()
    for pulling in (one, two):
        pulling.pull()
    assert files(one) == files(two)
    new = copy(store, tmp_path / "new", f"{RUNNER}2")
    new.pull()
    assert files(new) == files(two)
    number = new.number
    new.push()
    assert new.number == number, "it has nothing to tell"
    blocks = {key.split("/")[3] for key in store.list("run/a/log/")}
    assert blocks == {"0", *(["1"] if number >= 100 else []), *(["end"] if seed == 0 else [])}
    assert len(store.list("run/a/log/0/")) <= 400


@pytest.mark.parametrize("seed", range(40))
def test_a_writer_is_killed_at_any_moment(
    store: Exchange, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who takes its place begins with what the log has: a state that its directory was in, whole."""
    monkeypatch.setattr(mirror, "CHANGE_BYTES", 1 << 20)
    dice = random.Random(seed)
    dying = Dying(store, dice.randrange(1, 120) if seed < 20 else dice.randrange(200, 500), after=bool(seed % 2))
    one = copy(dying, tmp_path / "one", f"{RUNNER}1")
    states: list[dict[str, bytes]] = [{}]

    def until_it_dies() -> None:
        one.push(begins=True)
        while True:
            change(dice, one.directory, "a")
            states.append({path: (one.directory / path).read_bytes() for path in tree(one.directory)})
            one.push(whole=dice.random() < 0.1)

    with pytest.raises(Dies):
        until_it_dies()
    two = copy(store, tmp_path / "two", f"{RUNNER}2")
    two.push(begins=True)
    held = {path: data for path, data in files(two).items() if not path.startswith("samples/")}
    told = [{p: data for p, data in state.items() if not p.startswith("samples/")} for state in states[-2:]]
    assert held in told
    change(dice, two.directory, "a")
    time.sleep(mirror.SETTLED_S)
    two.push()
    three = copy(store, tmp_path / "three", "api")
    three.pull()
    assert files(three) == files(two)


def test_what_was_apart_is_made_anew_where_it_was_not_read(store: Exchange, tmp_path: Path) -> None:
    """A run that goes on after its end makes its model again, and samples of a step that was not committed."""
    one, two, reader = (copy(store, tmp_path / name, name) for name in ("runner-1", "runner-2", "api"))
    (one.directory / "samples").mkdir()
    for name in "abc":
        (one.directory / "samples" / name).write_bytes(b"old")
    one.push(whole=True)
    two.push(begins=True)
    reader.pull()
    (two.directory / "samples" / "a").write_bytes(b"new")
    (two.directory / "samples" / "b").unlink()
    two.push(whole=True)
    reader.pull()
    assert files(reader) == {"samples/a": b"new", "samples/c": b"old"}


def test_a_writer_that_was_replaced_is_fenced_and_changes_nothing(store: Exchange, tmp_path: Path) -> None:
    one, two = (copy(store, tmp_path / name, f"{RUNNER}{name}") for name in ("one", "two"))
    one.push(begins=True)
    (one.directory / "events").write_bytes(b"one\n")
    one.push()
    two.push(begins=True)
    (one.directory / "events").write_bytes(b"one\nof a ghost\n")
    with pytest.raises(Fenced, match="taken this run over"):
        one.push()
    two.pull()
    assert files(two) == {"events": b"one\n"}


def test_who_was_away_for_long_neither_misses_nor_hides_a_change(
    store: Exchange, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it would read next has been put together and deleted: its number is free again, and not the next one."""
    one, two = copy(store, tmp_path / "one", f"{RUNNER}1"), copy(store, tmp_path / "two", "api")
    two.pull()
    for number in range(1000):
        (one.directory / "a").write_bytes(str(number).encode())
        one.push()
    assert store.put_if_absent("run/a/log/0/00000000", b"") is not None, "it is gone"
    store.delete("run/a/log/0/00000000")
    monkeypatch.setattr(mirror, "FRESH_S", 0.0)  # it is half a minute later
    (two.directory / "b").write_bytes(b"from two")
    two.push()
    assert two.number == 1001
    one.pull()
    assert files(one) == files(two) == {"a": b"999", "b": b"from two"}


def test_what_was_decided_by_an_older_file_is_refused_and_nothing_of_it_written(
    store: Exchange, tmp_path: Path
) -> None:
    one, two = (Mirror(store, "api", tmp_path / name) for name in ("one", "two"))
    one.write({"a/api.json": b"1", "b/api.json": b"1"})
    with pytest.raises(Overtaken):
        two.write({"a/api.json": b"2", "new": b"2"})
    assert not (two.directory / "new").exists()
    two.write({"c/api.json": b"3"})
    one.write({"b/api.json": None})  # others' files may change meanwhile
    two.pull()
    assert {path: (two.directory / path).read_bytes() for path in tree(two.directory)} == {
        "a/api.json": b"1",
        "c/api.json": b"3",
    }


@pytest.mark.parametrize(
    "entries",
    [
        *([[path, 0, 1, ""]] for path in ("../x", "/x", "a/../../x", "a//b", "", "a\0b", "a\ud800")),
        [["a", -1, 1, ""]], [["a", 2, 1, ""]], [["a", float("inf"), 1, ""]], [["a", 0, "b", ""]],
        [["a", 0, 1, "../../x"]], [["a"]], ["a"], None,
    ],
)  # fmt: skip
def test_a_change_reaches_no_other_place(store: Exchange, tmp_path: Path, entries: Any) -> None:
    """A job's own code has the credentials to write anything into its run's log."""
    two = copy(store, tmp_path / "two", "api")
    told = json.dumps({"by": "runner-x", "time": 0, "files": entries}).encode()
    store.put("run/a/log/0/00000000", told + b"\nx")
    with pytest.raises(RunError, match="not a change"):
        two.pull()
    assert list(tree(tmp_path / "two")) == []


def test_a_change_that_goes_too_deep(store: Exchange, tmp_path: Path) -> None:
    store.put("run/a/log/0/00000000", b"[" * 100_000 + b"\n")
    with pytest.raises(RunError, match="not a change"):
        copy(store, tmp_path / "two", "api").pull()


def test_what_is_anothers_to_say_is_not_touched(store: Exchange, tmp_path: Path) -> None:
    job = copy(store, tmp_path / "job", f"{RUNNER}1")
    (job.directory / "api.json").write_bytes(b"owner: somebody else")
    job.push()
    (tmp_path / "api").mkdir()
    (tmp_path / "api" / "api.json").write_bytes(b"owner: me")
    Mirror(store, "run/a", tmp_path / "api", kept=frozenset({"api.json"})).pull()
    assert (tmp_path / "api" / "api.json").read_bytes() == b"owner: me"


def test_a_store_that_is_away_loses_nothing(store: Exchange, tmp_path: Path) -> None:
    """A put may have been done although it failed: what comes after it is on top of it all the same."""

    class Away(Dying):
        def __getattr__(self, name: str) -> Any:
            found = super().__getattr__(name)

            def called(*args: Any, **named: Any) -> Any:
                try:
                    return found(*args, **named)
                except Dies as error:
                    raise Unavailable("away") from error

            return called

    for after in (False, True):
        away = Away(store, 3, after=after)
        one = copy(away, tmp_path / f"one-{after}", f"{RUNNER}{after}")
        one.push(begins=True)
        failed = 0
        for number in range(5):
            with (one.directory / "a").open("ab") as file:
                file.write(f"{after} {number}\n".encode() * 30)
            try:
                one.push()
            except Unavailable:
                failed += 1
        assert failed == 1
        one.push()
        two = copy(store, tmp_path / f"two-{after}", "api")
        two.pull()
        assert files(two) == files(one)
