"""A call under torch.profiler is the same call, and leaves a trace of what it ran."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import torch

from functions.base.wire import Call, Event, Ref
from functions.call.function import Context
from functions.exchange.directory import DirectoryExchange
from functions.server.profile import profiled


def work() -> Iterator[Event]:
    torch.ones(4, 4) @ torch.ones(4, 4)
    yield Event("samples", data={"n": 1})
    yield Event("done", data={"answer": 42})


def test_the_done_event_names_the_trace(tmp_path: Path) -> None:
    exchange = DirectoryExchange(str(tmp_path / "exchange"))
    context = Context(exchange, str(tmp_path))
    first, done = profiled(work(), context, "profile.json.gz")
    assert first == Event("samples", data={"n": 1})
    assert done.data["answer"] == 42
    trace = json.loads(gzip.decompress(exchange.get(Ref.from_json(done.data["profile"]))))
    assert "aten::mm" in {event.get("name") for event in trace["traceEvents"]}
    assert [path.name for path in tmp_path.iterdir()] == ["exchange"], "nothing is left in the scratch directory"
    half = profiled(work(), context, "other")
    next(half)
    half.close()  # a cut or cancelled call: the next one can be traced
    assert "profile" in [*profiled(work(), context, "third")][-1].data


def test_a_call_says_so_only_where_it_is_asked() -> None:
    assert not Call.from_json({"id": "a", "operation": "train"}).profile
    assert Call.from_json(Call("a", "train", profile=True).to_json()).profile
