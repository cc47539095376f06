"""Runs a job by the command line, and measures it from outside: wall and CPU time of each step, memory, the trace.

CPU time is that of the whole process tree: of every process that lives its own and its ended children's. A process that
has ended and was waited for is part of its parent's figures, so nothing of a replica that came and went is lost.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ENV = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}  # fmt: skip
TICKS = os.sysconf("SC_CLK_TCK")
LOOK_EVERY_S = 0.01


@dataclass(frozen=True)
class StepFigures:
    """From one step's line in metrics.jsonl to the next one's."""

    step: int
    wall_s: float
    cpu_s: float
    """Of all processes."""
    functions_cpu_s: Mapping[str, float]
    """By function, of replicas that lived from one line to the other; "orchestrator" is among them."""
    metrics: Mapping[str, float]

    @property
    def orchestrator_cpu_s(self) -> float:
        return self.functions_cpu_s["orchestrator"]


@dataclass(frozen=True)
class JobFigures:
    steps: Sequence[StepFigures]
    peak_rss_mb: float
    """Of the orchestrator's process."""
    output: str
    spans: Sequence[Mapping[str, Any]] = field(default_factory=list)
    """The complete ("X") events of trace.json, with the names of their group and lane."""


def cpu_of(pid: int) -> tuple[float, float]:
    """Seconds of user and system time: its own, and those of its ended children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own, ended = sum(map(int, fields[11:13])), sum(map(int, fields[13:15]))
    return own / TICKS, ended / TICKS


def family(pid: int) -> list[int]:
    """A process and all its descendants that live."""
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, size = {pid}, 0
    while len(found) > size:
        size = len(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return sorted(found)


@dataclass(frozen=True)
class Moment:
    """What a job's processes have used by now."""

    time_s: float
    cpu_s: float
    of_process: Mapping[int, float]
    names: Mapping[int, str]

    @classmethod
    def now(cls, orchestrator: int) -> Moment:
        total, own, names = 0.0, {}, {}
        for pid in family(orchestrator):
            with suppress(OSError):
                own[pid], ended = cpu_of(pid)
                total += own[pid] + ended  # also of one that has ended and is not waited for yet: it has no files
                names[pid] = "orchestrator" if pid == orchestrator else function_of(pid)
        return cls(time.perf_counter(), total, own, names)

    def since(self, before: Moment) -> tuple[float, float, dict[str, float]]:
        """Wall time, CPU time, CPU time by function."""
        functions: dict[str, float] = {}
        for pid in self.names.keys() & before.of_process.keys():
            used = self.of_process[pid] - before.of_process[pid]
            functions[self.names[pid]] = functions.get(self.names[pid], 0.0) + used
        return self.time_s - before.time_s, self.cpu_s - before.cpu_s, functions


def function_of(pid: int) -> str:
    """`train` for a process that writes to logs/train-0.log, `node-agent` for the one that replicas come from."""
    name = Path(os.readlink(f"/proc/{pid}/fd/1")).stem
    return name if name == "node-agent" else name.rpartition("-")[0]


def peak_rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1e3
    return 0.0


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file that grows; none while it does not exist."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def run_job(
    job: Path, run: Path, overrides: Sequence[str], *, timeout_s: float, core: int | None = None,
    program: Sequence[str] = ("-m", "orchestrator.commands"),
) -> JobFigures:  # fmt: skip
    """Runs `job` in the new run directory `run`; `core` pins all of its processes. Raises SystemExit if it fails."""
    command = [sys.executable, *program, "run", str(job), "--run-dir", str(run), *overrides]
    log = run.with_name(run.name + ".log")
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=os.environ | ENV, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True,
            preexec_fn=None if core is None else lambda: os.sched_setaffinity(0, {core}),
        )  # fmt: skip
        try:
            steps, peak_mb = _watch(process, run / "metrics.jsonl", time.monotonic() + timeout_s)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)  # functions go to zero in order
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: {log.read_text()[-2000:] or process.returncode}")
    return JobFigures(steps, peak_mb, log.read_text(), spans_of(run / "trace.json"))


def _watch(process: subprocess.Popen[bytes], metrics: Path, give_up_s: float) -> tuple[list[StepFigures], float]:
    steps: list[StepFigures] = []
    before: Moment | None = None
    size, seen, peak_mb = 0, 0, 0.0
    while process.poll() is None:
        if time.monotonic() > give_up_s:
            raise SystemExit(f"{metrics.parent}: took too long; {seen} steps are done (--timeout-s)")
        time.sleep(LOOK_EVERY_S)
        if not metrics.exists() or metrics.stat().st_size == size:
            continue
        size, lines = metrics.stat().st_size, lines_of(metrics)
        now = Moment.now(process.pid)
        if process.pid not in now.of_process:
            break  # it has ended
        with suppress(OSError):
            peak_mb = max(peak_mb, peak_rss_mb(process.pid))
        if before is not None and len(lines) == seen + 1:  # else two steps came between two looks
            steps.append(StepFigures(seen, *now.since(before), lines[-1]))
        before, seen = now, len(lines)
    process.wait()
    return steps, peak_mb


def spans_of(trace: Path) -> list[dict[str, Any]]:
    """{group, lane, name, start_s, stop_s, args} of each span in a trace.json."""
    events = json.loads(trace.read_text())
    groups = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return [
        {
            "group": groups[e["pid"]], "lane": lanes[e["pid"], e["tid"]], "name": e["name"],
            "start_s": e["ts"] / 1e6, "stop_s": (e["ts"] + e["dur"]) / 1e6, "args": e["args"],
        }
        for e in events
        if e["ph"] == "X"
    ]  # fmt: skip


def covered_s(intervals: Sequence[tuple[float, float]], start_s: float, stop_s: float) -> float:
    """Length of the union of the intervals within [start_s, stop_s]."""
    total, reached = 0.0, start_s
    for begin, end in sorted(intervals):
        begin, end = max(begin, reached), min(end, stop_s)
        if end > begin:
            total += end - begin
            reached = end
    return total
