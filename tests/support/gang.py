"""A gang of train calls as real processes: each rank a process forked from a clean server, as the warm parent does."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from functions.exchange.directory import DirectoryExchange
from functions.wire import Call, Event, Json
from orchestrator.gang import rank_calls

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["functions.train.function", "tests.support.gang"])


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


def ranks_of(call: Call, size: int) -> list[Call]:
    """One attempt at `call` by a gang."""
    return rank_calls(call, size, secrets.token_hex(4))


def run_gang(root: Path, scratch: Path, calls: Sequence[Call], *, die: int | None = None) -> list[Ended]:
    """Runs the calls side by side; rank `die` is killed by SIGKILL when it has made its first forward pass."""
    started = []
    for rank, call in enumerate(calls):
        ours, theirs = CONTEXT.Pipe(duplex=False)
        own = scratch / f"rank-{rank}"
        process = CONTEXT.Process(target=_rank, args=(str(root), str(own), call.to_json(), theirs, rank == die))
        process.start()
        theirs.close()
        started.append((process, ours))
    ended = []
    for process, ours in started:
        try:
            line = ours.recv_bytes()
        except EOFError:
            line = None
        process.join()
        assert process.exitcode is not None
        ended.append(Ended(None if line is None else Event.from_line(line), process.exitcode))
    return ended


def _rank(root: str, scratch: str, call: Any, answer: Any, die: bool) -> None:
    import torch

    from functions.attempt import Attempt
    from functions.train.function import TrainFunction

    class Deadly(dict[str, Any]):
        """Progress whose second pack is the end."""

        def update(self, data: Any, **_: Any) -> None:  # type: ignore[override]
            if data["packs"] == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    lines: list[bytes] = []
    attempt = Attempt(Call.from_json(call), lines.append, progress=Deadly() if die else {})
    attempt.run(lambda: TrainFunction(device="cpu"), lambda: DirectoryExchange(root), scratch)
    answer.send_bytes(lines[-1])
