"""A gang of train calls as real processes: each rank a process forked from a clean server, as the node agent does."""

from __future__ import annotations

import os
import secrets
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from functions.base.wire import Call, Event, Json, Ref, Version
from functions.call.parallel import DATA_PARALLEL, Parallel
from functions.exchange.directory import DirectoryExchange
from orchestrator.calls.gang import rank_calls
from tests.support.forked import CONTEXT


@dataclass(frozen=True)
class Ended:
    """How one rank ended: its last event, or the signal that killed it."""

    event: Event | None
    exit_code: int

    @property
    def data(self) -> Json:
        assert self.event is not None, f"exit code {self.exit_code}"
        assert self.event.kind == "done", self.event.data
        return dict(self.event.data)


def ranks_of(call: Call, size: int, parallel: Parallel = DATA_PARALLEL) -> list[Call]:
    """One attempt at `call` by a gang."""
    return rank_calls(call, size, secrets.token_hex(4), parallel)


def run_gang(root: Path, scratch: Path, calls: Sequence[Call], *, die: int | None = None) -> list[Ended]:
    """Runs the calls side by side; rank `die` is killed by SIGKILL when it has made its first forward pass."""
    return run_gangs(root, scratch, [calls], die=die)[0]


def run_gangs(
    root: Path, scratch: Path, gangs: Sequence[Sequence[Call]], *, die: int | None = None, device: str = "cpu"
) -> list[list[Ended]]:
    """One gang after the other, in the same processes: as many as the largest has ranks. With `cuda` each sees one
    device."""
    started = []
    for rank in range(max(map(len, gangs))):
        ours, theirs = CONTEXT.Pipe(duplex=False)
        calls = [calls[rank].to_json() if rank < len(calls) else None for calls in gangs]
        own = scratch / f"rank-{rank}"
        process = CONTEXT.Process(target=_rank, args=(str(root), str(own), calls, theirs, rank == die, device, rank))
        process.start()
        theirs.close()
        started.append((process, ours))
    lines = list[list[bytes | None]]()
    for process, ours in started:
        try:
            lines.append(ours.recv())
        except EOFError:
            lines.append([None] * len(gangs))
        process.join()
        assert process.exitcode is not None
    codes = [process.exitcode or 0 for process, _ in started]
    return [
        [Ended(None if (line := lines[r][k]) is None else Event.from_line(line), codes[r]) for r in range(len(gang))]
        for k, gang in enumerate(gangs)
    ]


def _rank(root: str, scratch: str, calls: Sequence[Any], answer: Any, die: bool, device: str, rank: int) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    import torch

    from functions.server.attempt import Attempt
    from functions.train.function import TrainFunction

    class Deadly(dict[str, Any]):
        """Progress whose second pack is the end."""

        def update(self, data: Any, **_: Any) -> None:  # type: ignore[override]
            if data["packs"] == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    ended: list[bytes | None] = []
    for call in calls:
        lines: list[bytes] = []
        if call is not None:
            attempt = Attempt(Call.from_json(call), lines.append, progress=Deadly() if die else {})
            attempt.run(lambda: TrainFunction(device=device), lambda: DirectoryExchange(root), scratch)
        ended.append(lines[-1] if lines else None)
        if lines and Event.from_line(lines[-1]).kind == "error":
            break  # with the process its connections end, which its peers notice
    answer.send([*ended, *[None] * (len(calls) - len(ended))])


@dataclass(frozen=True)
class Republish:
    """A gang that trains nothing: it reads `source` and publishes it as `version`, with `note` as the call's result."""

    source: Version
    version: Version
    params: Json
    size: int
    attempt: str
    note: str = ""
    die: tuple[int, str] | None = None
    """A rank, and whether it is killed `before` or `after` it has put its shard."""
    parallel: Parallel = DATA_PARALLEL


@dataclass(frozen=True)
class Moved:
    """What one rank ended with: its error, or what it read (by key, ranges added up) and wrote."""

    error: str
    read: dict[str, int]
    written: dict[str, int]


def run_republish(root: Path, gangs: Sequence[Republish]) -> list[list[Moved | None]]:
    """All gangs side by side; None: the rank was killed."""
    started = []
    for gang in gangs:
        for rank in range(gang.size):
            ours, theirs = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(target=_republish, args=(str(root), gang, rank, theirs))
            process.start()
            theirs.close()
            started.append((process, ours))
    ended: list[Moved | None] = []
    for process, ours in started:
        try:
            ended.append(ours.recv())
        except EOFError:
            ended.append(None)
        process.join()
    found = iter(ended)
    return [[next(found) for _ in range(gang.size)] for gang in gangs]


def _republish(root: str, gang: Republish, rank: int, answer: Any) -> None:
    import torch

    from functions.call.function import Context
    from functions.call.train_params import TrainParams
    from functions.train.gang import ALONE, GangParams, meet
    from functions.train.state import load, publish_state

    read: dict[str, int] = {}
    written: dict[str, int] = {}
    lock = threading.Lock()

    class Counting(DirectoryExchange):
        @property
        def durable(self) -> Counting:
            return self

        def get(self, key: Any, *, start: int = 0, length: int | None = None) -> bytes:
            data = super().get(key, start=start, length=length)
            name = key if isinstance(key, str) else key.key
            with lock:
                read[name] = read.get(name, 0) + len(data)
            return data

        def put(self, key: str, data: Any, *, lifetime_s: float | None = None) -> Ref:
            mine = "/shard-" in key and gang.die is not None and gang.die[0] == rank
            if mine and gang.die == (rank, "before"):
                os.kill(os.getpid(), signal.SIGKILL)
            ref = super().put(key, data, lifetime_s=lifetime_s)
            written[key] = ref.size_bytes
            if mine:
                os.kill(os.getpid(), signal.SIGKILL)
            return ref

    torch.set_num_threads(1)
    context = Context(Counting(Path(root)), f"{root}/../scratch/{gang.attempt}-{rank}")
    params, device = TrainParams.from_json(gang.params), torch.device("cpu")
    told = {"note": gang.note, "stats": {}}
    try:
        if gang.size == 1:
            state = load(gang.source, params, context, device, ALONE)
            publish_state(state, gang.version, state.carry, told, context)
        else:
            who = GangParams(
                id=gang.version.call, attempt=gang.attempt, size=gang.size, rank=rank, parallel=gang.parallel
            )
            with meet(who, device, context, lambda: False) as ranks:
                assert ranks is not None
                state = load(gang.source, params, context, device, ranks)
                publish_state(state, gang.version, state.carry, told, context)
        answer.send(Moved("", read, written))
    except Exception as error:
        answer.send(Moved(f"{type(error).__name__}: {error}", read, written))
