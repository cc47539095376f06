"""Seconds from a killed rank to the gang's next pass: survivors keep their rows, against all ranks loading anew.

python bench/gang_lost.py [--meshes 2 4] [--hidden 512] [--layers 8] [--repeats 2]

The model and the step of gang_bytes.py. The last rank is killed (SIGKILL) when the first pass is made; the next attempt
begins when the others have said so. New processes have their libraries loaded and wait. From the kill to the time when
every rank of that attempt has made its first pass.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bench.gang_bytes import PROCESSES, inputs, make_model, step
from functions.base.wire import Call, Event, Json
from functions.call.parallel import Parallel
from functions.exchange.directory import DirectoryExchange
from functions.server.attempt import Attempt
from functions.train.function import TrainFunction
from functions.weights.base import import_model
from orchestrator.calls.gang import rank_calls


class FirstPass(dict[str, Any]):
    """Progress that notes when the first pass was made; of a rank that dies, that is its end."""

    def __init__(self, die: bool) -> None:
        self.die, self.at_s = die, 0.0

    def update(self, data: Any, **_: Any) -> None:  # type: ignore[override]
        self.at_s = self.at_s or time.monotonic()
        if self.die:
            os.kill(os.getpid(), signal.SIGKILL)


def rank(root: str, scratch: str, die: bool, pipe: Connection) -> None:
    """Makes the calls that come; answers each with the kind of its last event, and when its first pass was."""
    torch.set_num_threads(1)
    function = TrainFunction(device="cpu")
    pipe.send("here")
    while call := pipe.recv():
        lines: list[bytes] = []
        progress = FirstPass(die)
        Attempt(Call.from_json(call), lines.append, progress=progress).run(
            lambda: function, lambda: DirectoryExchange(root), scratch
        )
        pipe.send((Event.from_line(lines[-1]).kind, progress.at_s))


def lost(root: Path, scratch: Path, call: Call, size: int, parallel: Parallel, kept: bool) -> float:
    """Seconds, of one kill."""

    def start(number: int, die: bool = False) -> tuple[Any, Connection]:
        ours, theirs = PROCESSES.Pipe()
        name = f"{scratch}/{number}-{secrets.token_hex(3)}"
        process = PROCESSES.Process(target=rank, args=(str(root), name, die, theirs))
        process.start()
        theirs.close()
        assert ours.recv() == "here"
        return process, ours

    first = [start(number, die=number == size - 1) for number in range(size)]
    fresh = [start(number) for number in range(size - 1 if kept else 0, size)]
    for (_, pipe), own in zip(first, rank_calls(call, size, secrets.token_hex(4), parallel), strict=True):
        pipe.send(own.to_json())
    first[-1][0].join()
    killed_s = time.monotonic()
    kinds = [pipe.recv()[0] for _, pipe in first[:-1]]
    assert kinds == ["error"] * (size - 1), kinds
    second = [*first[:-1], *fresh] if kept else fresh
    for (_, pipe), own in zip(second, rank_calls(call, size, secrets.token_hex(4), parallel), strict=True):
        pipe.send(own.to_json())
    told = [pipe.recv() for _, pipe in second]
    assert {kind for kind, _ in told} == {"done"}
    for process, pipe in {*first[:-1], *fresh}:
        pipe.send(None)
        process.join()
    return float(max(at_s for _, at_s in told) - killed_s)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meshes", nargs="+", default=["2", "4"])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args(given)
    rows: list[Json] = []
    with tempfile.TemporaryDirectory() as name:
        root, scratch = Path(name) / "exchange", Path(name) / "scratch"
        exchange = DirectoryExchange(root)
        make_model(Path(name) / "model", options.hidden, options.layers)
        base = import_model(exchange, "policy", Path(name) / "model")
        params: Json = {"optimizer": {"lr": 1e-6}, "dtype": "bfloat16", "max_rollout_logprob_diff": "off"}
        first = Call("first", "train", inputs(exchange, 0), {"policy": base}, params)
        source, _ = step(root, scratch, first, "1")
        print(f"{'mesh':>6} {'kept s':>8} {'anew s':>8}")
        for mesh in options.meshes:
            ranks, *axes = mesh.split(":")
            parallel = Parallel(**{axis[:2]: int(axis[2:]) for axis in axes})
            found: dict[bool, list[float]] = {True: [], False: []}
            for repeat in range(options.repeats):
                for kept in found:
                    own = f"{mesh}-{repeat}-{kept}".replace(":", "-")
                    call = Call(own, "train", inputs(exchange, source.number), {"policy": source}, params)
                    found[kept].append(lost(root, scratch, call, int(ranks), parallel, kept))
                    exchange.delete("weights/policy/v000002")
            kept_s, anew_s = (statistics.median(found[kept]) for kept in (True, False))
            print(f"{mesh:>6} {kept_s:>8.2f} {anew_s:>8.2f}")
            rows.append({"mesh": mesh, "kept_s": found[True], "anew_s": found[False]})
    print(json.dumps({"bench": "gang_lost", "rows": rows}))


if __name__ == "__main__":
    main()
