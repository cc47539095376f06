"""Seconds from a killed rank to the gang's next pass: survivors keep their rows, against all ranks loading anew.

python bench/gang_lost.py [--meshes 2 4] [--hidden 512] [--layers 8] [--repeats 5]

The model and the step of gang_bytes.py. The last rank is killed (SIGKILL) as its first pass begins; the next attempt
begins when the others have said so. New processes have their libraries loaded and wait. From the kill to the time when
every rank of that attempt begins its first pass, where it is stopped; taken apart: until the survivors have said that
they lost a peer, until all ranks have met, the loading of the new rank and of the slowest other one, and what is left.
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
from functions.call.meter import Told
from functions.call.parallel import Parallel
from functions.exchange.directory import DirectoryExchange
from functions.server.attempt import Attempt
from functions.train.function import TrainFunction
from functions.weights.base import import_model
from orchestrator.calls.gang import rank_calls

PARTS = ("told", "met", "new loads", "others load", "pass")


class Stop(Exception):
    pass


class FirstPass(dict[str, Any]):
    """Progress that notes when the first pass began: the end of a rank that dies, and of a second attempt."""

    def __init__(self, die: bool, last: bool) -> None:
        self.die, self.last, self.at_s = die, last, 0.0

    def update(self, data: Any, **_: Any) -> None:  # type: ignore[override]
        self.at_s = self.at_s or time.monotonic()
        if self.die:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.last:
            raise Stop


def rank(root: str, scratch: str, die: bool, pipe: Connection) -> None:
    """Makes the calls that come; answers each with its last event's data, when it began and when its first pass was,
    and what its spans say: when the gang had met, and how long it loaded."""
    torch.set_num_threads(1)
    function = TrainFunction(device="cpu")
    pipe.send("here")
    while given := pipe.recv():
        call, last = given
        lines: list[bytes] = []
        progress, begun_s = FirstPass(die, last), time.monotonic()
        Attempt(Call.from_json(call), lines.append, progress=progress).run(
            lambda: function, lambda: DirectoryExchange(root), scratch
        )
        told = next(event.data["meter"] for line in lines if "meter" in (event := Event.from_line(line)).data)
        spans = {span.name: span for span in Told.from_json(told).spans}
        load_s = (spans["load"].stop_s or 0.0) - spans["load"].start_s
        met_s = begun_s + spans["read"].start_s
        pipe.send((Event.from_line(lines[-1]).data, progress.at_s, met_s, load_s))


def lost(root: Path, scratch: Path, call: Call, size: int, parallel: Parallel, kept: bool) -> list[float]:
    """Seconds of one kill: in all, and of PARTS."""

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
        pipe.send((own.to_json(), False))
    first[-1][0].join()
    killed_s = time.monotonic()
    ends = [pipe.recv()[0] for _, pipe in first[:-1]]
    told_s = time.monotonic() - killed_s
    assert {end["kind"] for end in ends} == {"retryable"}, ends
    second = [*first[:-1], *fresh] if kept else fresh
    for (_, pipe), own in zip(second, rank_calls(call, size, secrets.token_hex(4), parallel), strict=True):
        pipe.send((own.to_json(), True))
    said = [pipe.recv() for _, pipe in second]
    assert all("Stop" in end["message"] for end, *_ in said), said
    for process, pipe in {*first[:-1], *fresh}:
        pipe.send(None)
        process.join()
    whole_s = max(at_s for _, at_s, _, _ in said) - killed_s
    met_s = max(met_s for _, _, met_s, _ in said) - killed_s - told_s
    *others_s, new_s = [load_s for *_, load_s in said]
    return [whole_s, told_s, met_s, new_s, max(others_s), whole_s - told_s - met_s - max(new_s, *others_s)]


def _line(mesh: str, kept: bool, ratio: str, values: Sequence[float]) -> str:
    seconds, *parts = (f"{value:.2f}" for value in values)
    cells = (mesh, "kept" if kept else "anew", seconds, ratio, *parts)
    return " ".join(f"{cell:>12}" for cell in cells)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meshes", nargs="+", default=["2", "4"])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(given)
    rows: list[Json] = []
    PROCESSES.set_forkserver_preload(["bench.gang_lost", "functions.models.pretrained"])
    with tempfile.TemporaryDirectory() as name:
        root, scratch = Path(name) / "exchange", Path(name) / "scratch"
        exchange = DirectoryExchange(root)
        make_model(Path(name) / "model", options.hidden, options.layers)
        base = import_model(exchange, "policy", Path(name) / "model")
        params: Json = {"optimizer": {"lr": 1e-6}, "dtype": "bfloat16", "max_rollout_logprob_diff": "off"}
        first = Call("first", "train", inputs(exchange, 0), {"policy": base}, params)
        source, _ = step(root, scratch, first, "1")
        print(" ".join(f"{name:>12}" for name in ("mesh", "", "seconds", "of anew", *PARTS)))
        for mesh in options.meshes:
            ranks, *axes = mesh.split(":")
            parallel = Parallel(**{axis[:2]: int(axis[2:]) for axis in axes})
            found: dict[bool, list[list[float]]] = {True: [], False: []}
            for repeat in range(options.repeats):
                for kept in found:
                    own = f"{mesh}-{repeat}-{kept}".replace(":", "-")
                    call = Call(own, "train", inputs(exchange, source.number), {"policy": source}, params)
                    found[kept].append(lost(root, scratch, call, int(ranks), parallel, kept))
                    print(_line(mesh, kept, "", found[kept][-1]), flush=True)
            ratio = statistics.median(a[0] / b[0] for a, b in zip(found[True], found[False], strict=True))
            for kept, shown in ((True, f"{ratio:.2f}"), (False, "")):
                medians = [statistics.median(values) for values in zip(*found[kept], strict=True)]
                print(_line("median", kept, shown, medians))
            rows.append({"mesh": mesh, "kept_s": found[True], "anew_s": found[False]})
    print(json.dumps({"bench": "gang_lost", "rows": rows}))


if __name__ == "__main__":
    main()
