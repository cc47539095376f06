"""trace.json: whole JSON after every write, after kills and over resumes; lanes, times and counters as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.base.errors import RunError
from orchestrator.platforms.base import Usage
from orchestrator.telemetry.trace import JOB, Trace, TraceSpan


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_bytes()) if event["ph"] == kind]


def lanes(path: Path) -> dict[str, list[tuple[str, int, int]]]:
    """`process/thread`: (name, ts, dur) of its spans."""
    metadata = events(path, "M")
    processes = {e["pid"]: e["args"]["name"] for e in metadata if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in metadata if e["name"] == "thread_name"}
    found: dict[str, list[tuple[str, int, int]]] = {}
    for e in events(path, "X"):
        lane = f"{processes[e['pid']]}/{threads[e['pid'], e['tid']]}"
        found.setdefault(lane, []).append((e["name"], e["ts"], e["dur"]))
    return found


def counts(path: Path) -> list[tuple[int, int]]:
    return [(e["ts"], e["args"]["replicas"]) for e in events(path, "C")]


def test_lanes_calls_and_counters(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = Trace(path, now_s=100.0, unix_s=5000.0)
    assert lanes(path) == {}
    call = TraceSpan("generate", "generate-0", "generate", 101.0, 102.0, {"cold": True})
    usage = [Usage("generate", "generate-0", 100.5, 103.0, 1.0), Usage("generate", "generate-1", 101.5, None, 0.0)]
    trace.write([TraceSpan(JOB, "gen", "gen", 100.5, 103.0), call], usage, now_s=103.5)
    assert lanes(path) == {
        "generate/generate-0": [("replica", 500_000, 2_500_000), ("generate", 1_000_000, 1_000_000)],
        "job/gen": [("gen", 500_000, 2_500_000)],
    }
    assert counts(path) == [(500_000, 1), (1_500_000, 2), (3_000_000, 1)]
    usage[1] = Usage("generate", "generate-1", 101.5, 104.0, 2.0)
    trace.write([], usage, now_s=105.0)
    trace.write([], usage, now_s=106.0)
    trace.close()
    assert lanes(path)["generate/generate-1"] == [("replica", 1_500_000, 2_500_000)]
    assert counts(path)[3:] == [(4_000_000, 0)]


def test_a_resumed_job_goes_on_to_the_right(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = Trace(path, now_s=100.0, unix_s=5000.0)
    trace.write([TraceSpan("train", "train-0", "train", 100.0, 101.0)], [], 101.0)
    trace.close()
    trace = Trace(path, now_s=7.0, unix_s=5060.0)  # a minute later, on another event loop
    trace.write([TraceSpan("train", "train-0", "train", 8.0, 9.0)], [Usage("train", "train-0", 7.5, 9.5, 1.0)], 10.0)
    trace.close()
    assert lanes(path) == {
        "train/train-0": [("train", 0, 1_000_000), ("replica", 60_500_000, 2_000_000), ("train", 61_000_000, 1_000_000)]
    }
    assert counts(path) == [(60_500_000, 1), (62_500_000, 0)]


@pytest.mark.parametrize("cut", range(1, 220, 3))
def test_cut_off_anywhere_it_is_repaired(tmp_path: Path, cut: int) -> None:
    """A kill in the middle of a write leaves a prefix of it."""
    path = tmp_path / "trace.json"
    trace = Trace(path, now_s=0.0, unix_s=5000.0)
    trace.write([TraceSpan("train", "train-0", f"call {i}", i, i + 1) for i in range(5)], [], 6.0)
    trace.close()
    whole = lanes(path)["train/train-0"]
    path.write_bytes(path.read_bytes()[:-cut])
    trace = Trace(path, now_s=20.0, unix_s=5020.0)
    trace.write([TraceSpan("train", "train-0", "last", 20.0, 21.0)], [], 21.0)
    trace.close()
    *kept, last = lanes(path)["train/train-0"]
    assert kept == whole[: len(kept)]
    assert last == ("last", 20_000_000, 1_000_000)


def test_a_file_that_is_no_trace_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": []}')
    with pytest.raises(RunError, match="not a trace of this program"):
        Trace(path, now_s=0.0, unix_s=0.0)
    assert path.read_text() == '{"traceEvents": []}'


def test_phases_lie_within_their_call_and_are_no_calls(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = Trace(path, now_s=100.0, unix_s=5000.0)
    phases = [("start", 100.5, 101.25), ("load", 101.25, 101.75), ("fetch", 101.25, 101.5), ("after", 103.0, 104.0)]
    call = TraceSpan("train", "train-0", "train", 101.0, 102.0, {}, phases)
    trace.write([call], [], now_s=103.0)
    trace.close()
    assert lanes(path) == {"train/train-0": [("train", 1_000_000, 1_000_000)]}
    edges = [(e["ph"], e["name"], e["ts"]) for e in json.loads(path.read_bytes()) if e["ph"] in "BE"]
    assert edges == [
        ("B", "start", 1_000_000), ("E", "start", 1_250_000), ("B", "load", 1_250_000), ("B", "fetch", 1_250_000),
        ("E", "fetch", 1_500_000), ("E", "load", 1_750_000),
    ]  # fmt: skip
