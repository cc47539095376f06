"""A rank that is lost: the others keep what they have loaded, and what they have published."""

from __future__ import annotations

import hashlib
import os
import secrets
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from functions.base.wire import Call, Event, Json, Version
from functions.call.meter import Told
from functions.call.parallel import DATA_PARALLEL, Parallel
from orchestrator.calls.gang import rank_calls
from tests.support.forked import CONTEXT
from tests.train.test_gang import GRPO, Bench, assert_equal_step, bench

__all__ = ["bench"]
pytestmark = pytest.mark.timeout(300)


def _rank(root: str, scratch: str, calls: Sequence[Json], die: bool, answer: Any) -> None:
    """One function for all calls; each one's last event and the bytes that it has read. `die`: in the first pass."""
    import torch

    from functions.exchange.directory import DirectoryExchange
    from functions.server.attempt import Attempt
    from functions.train.function import TrainFunction

    class Deadly(dict[str, Any]):
        def update(self, data: Any, **_: Any) -> None:  # type: ignore[override]
            if die:
                os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    function, ended = TrainFunction(device="cpu"), []
    for call in calls:
        lines: list[bytes] = []
        Attempt(Call.from_json(call), lines.append, progress=Deadly()).run(
            lambda: function, lambda: DirectoryExchange(root), scratch
        )
        told = next(event.data["meter"] for line in lines if "meter" in (event := Event.from_line(line)).data)
        ended.append((lines[-1], Told.from_json(told).bytes_in))
    answer.send(ended)


@pytest.mark.parametrize("parallel", [DATA_PARALLEL, Parallel(tp=2)], ids=["dp", "tp"])
def test_an_attempt_after_a_killed_rank_reads_what_that_one_had(bench: Bench, parallel: Parallel) -> None:
    """Rank 1 is killed in its first pass; a new one takes its place, then all make the next step. Under tp, where
    columns are swapped, all read again after the kill."""
    again = bench.call("again", GRPO)
    attempts = [rank_calls(again, 2, secrets.token_hex(4), parallel) for _ in range(2)]
    one = bench.alone(bench.call("one", GRPO))
    made = Version("policy", 1, hashlib.sha256(b"again").hexdigest()[:12])
    attempts.append(rank_calls(bench.call("next", GRPO, made), 2, secrets.token_hex(4), parallel))
    whole = sum(entry.size_bytes for entry in bench.manifest(one).tensors)
    started = []
    for rank, numbers, die in ((0, (0, 1, 2), False), (1, (0,), True), (1, (1, 2), False)):
        ours, theirs = CONTEXT.Pipe(duplex=False)
        calls = [attempts[number][rank].to_json() for number in numbers]
        scratch = str(bench.scratch / f"{rank}-{die}")
        process = CONTEXT.Process(target=_rank, args=(str(bench.root), scratch, calls, die, theirs))
        process.start()
        theirs.close()
        started.append((process, ours))
    survivor, newcomer = started[0][1].recv(), started[2][1].recv()
    for process, _ in started:
        process.join()
    assert started[1][0].exitcode == -signal.SIGKILL
    first, second, third = (Event.from_line(line) for line, _ in survivor)
    assert (first.kind, first.data["kind"], second.kind, third.kind) == ("error", "retryable", "done", "done")
    assert_equal_step(bench, one, dict(second.data))
    assert_equal_step(bench, bench.alone(bench.call("one-next", GRPO, made)), dict(third.data))
    (first_read, second_read, third_read), (new_read, new_next) = ([n for _, n in own] for own in (survivor, newcomer))
    if parallel == DATA_PARALLEL:
        assert first_read - second_read > 0.45 * whole
        assert new_read - second_read > 0.45 * whole
    else:
        assert second_read >= first_read
    assert max(third_read, new_next) < 1.5 * whole, "less than half of weights and moments: manifests and the batch"
