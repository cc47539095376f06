"""What telemetry takes of a step of 512 samples: a real job on the local platform, everything on.

    python bench/telemetry.py [--steps 4]

The job is that of bench/orchestrator_time.py: 64 prompts, n = 8, a model of 3.5 M parameters, functions going to zero;
with any larger model the shares are smaller. On are: metrics.jsonl, TensorBoard, trace.json, now.json, plans.jsonl,
metrics.prom, cost.json, samples, events, log lines, and a trace of each step to a collector (a process of its own,
that does not count). CPU time inside telemetry code, by the clock of the thread that runs it:

    recorder   the files, at each commit, and the look at the job four times a second
    samples    prompt, response and reward of the step's first 64 samples
    counts     what Prometheus asks for, at each call's end
    spans      OpenTelemetry's spans and the context in the calls, and the accounts of the replicas
    export     the exporter's thread
    log        log lines of the orchestrator
    replicas   of each call: its meter, account, log lines and metrics (measured here, times the calls of a step)

    of cpu     as a share of the CPU time of all of the job's processes (target: under 1 %)
    of wall    as a share of the step's wall time, as if nothing ran beside it
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.jobs import ENV, run_job  # noqa: E402
from bench.orchestrator_time import JOB  # noqa: E402

SPENT: Counter[str] = Counter()
CALLS = 2000
COLLECTOR = """
from tests.telemetry.collector import collecting
with collecting() as collector:
    print(collector.url, flush=True)
    input()
    print(len(collector.spans), flush=True)
"""


def timed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def inner(*words: Any, **named: Any) -> Any:
        begun_s = time.thread_time()
        try:
            return call(*words, **named)
        finally:
            SPENT[part] += time.thread_time() - begun_s  # type: ignore[assignment]  # a Counter of seconds

    return inner


def timed_coroutine(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The time between its awaits."""

    @types.coroutine
    def drive(coroutine: Any) -> Generator[Any, Any, Any]:
        step: Callable[[], Any] = functools.partial(coroutine.send, None)
        while True:
            try:
                waits = timed(part, step)()
            except StopIteration as end:
                return end.value
            try:
                step = functools.partial(coroutine.send, (yield waits))
            except BaseException as error:
                step = functools.partial(coroutine.throw, error)

    async def inner(*words: Any, **named: Any) -> Any:
        return await drive(call(*words, **named))

    return inner


def inside(report: Path, arguments: list[str]) -> int:
    """The command line, with a clock at every door of telemetry."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    from functions.base.logs import LineHandler
    from functions.call.meter import Told
    from orchestrator.calls.tracing import AttemptSpan, Tracing
    from orchestrator.commands.main import main as command
    from orchestrator.session.recorder import Recorder
    from orchestrator.telemetry.job_metrics import JobMetrics

    for part, owner, names in (
        ("recorder", Recorder, ("committed", "planned", "note")), ("counts", JobMetrics, ("call_ended",)),
        ("spans", Tracing, ("begin", "attempt")), ("spans", AttemptSpan, ("reported", "end")),
        ("export", OTLPSpanExporter, ("export",)), ("log", LineHandler, ("emit",)),
    ):  # fmt: skip
        for name in names:
            setattr(owner, name, timed(part, getattr(owner, name)))
    Told.from_json = timed("spans", Told.from_json)  # type: ignore[method-assign]
    Recorder._watch = timed_coroutine("recorder", Recorder._watch)  # type: ignore[method-assign]
    Recorder.keep = timed_coroutine("samples", Recorder.keep)  # type: ignore[method-assign]
    span = Tracing.span

    @contextmanager
    def timed_span(self: Tracing, *words: Any) -> Generator[Any, None, None]:
        manager = span(self, *words)
        yield timed("spans", manager.__enter__)()
        timed("spans", manager.__exit__)(None, None, None)

    Tracing.span = timed_span  # type: ignore[assignment,method-assign]
    code = command(arguments)
    report.write_text(json.dumps(SPENT))
    return code


def replica_call_s() -> float:
    """CPU seconds that a replica's telemetry takes of one call with seven phases."""
    import logging

    from functions.base.logs import About, LineHandler
    from functions.base.wire import Call, Event
    from functions.server.attempt import Attempt

    about = About({"job": "j", "function": "generate", "replica": "generate-0"})
    log = logging.getLogger("bench")
    log.propagate, log.handlers = False, [LineHandler(io.StringIO(), about)]
    log.setLevel(logging.INFO)
    trace = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    begun_s = time.thread_time()
    for number in range(CALLS):
        attempt = Attempt(Call(f"c{number}", "generate", trace=trace), lambda _line: None)
        about.call = {"step": 1, "call": attempt.call.id}
        log.info("%s begins", "generate")
        for phase in ("start", "read", "fetch", "load", "generate", "publish", "publish"):
            with attempt.meter.phase(phase):
                attempt.meter.moved(bytes_in=1, bytes_out=1)
        Event("progress", data={"meter": attempt.meter.to_json()}).to_line()
        log.info("%s ends: %s after %.3f s", "generate", "done", 1.0)
    return (time.thread_time() - begun_s) / CALLS


def main() -> int:
    if "--inside" in sys.argv:
        at = sys.argv.index("--inside")
        return inside(Path(sys.argv[at + 1]), sys.argv[at + 2 :])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="steps after the first")
    parser.add_argument("--timeout-s", type=float, default=300.0)
    given = parser.parse_args()
    collector = subprocess.Popen(
        [sys.executable, "-c", COLLECTOR], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert collector.stdin is not None
    assert collector.stdout is not None
    with collector, tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        make = "limit=64, lengths='varying', prompts=512, prompt_length=64"
        code = f"import sys, pathlib; from bench.planted import make; make(pathlib.Path(sys.argv[1]), {make})"
        subprocess.run([sys.executable, "-c", code, directory], env=os.environ | ENV, cwd=ROOT, check=True)
        (folder / "job.toml").write_text(JOB.format(steps=given.steps + 1))
        report = folder / "spent.json"
        job = run_job(
            folder / "job.toml", folder / "run", [f"telemetry.otlp_endpoint={collector.stdout.readline().strip()}"],
            timeout_s=given.timeout_s, program=(str(Path(__file__).resolve()), "--inside", str(report)),
        )  # fmt: skip
        collector.stdin.write("\n")
        collector.stdin.flush()
        spans = int(collector.stdout.readline())
        spent = json.loads(report.read_text())
        trace_bytes = (folder / "run" / "trace.json").stat().st_size
    steps = given.steps + 2  # step 0 has telemetry too
    calls = sum(s["group"] != "job" and s["name"] != "replica" for s in job.spans) / steps
    per_call_s = replica_call_s()
    parts = {name: seconds / steps for name, seconds in sorted(spent.items())} | {"replicas": calls * per_call_s}
    counted = [step for step in job.steps if step.step > 1]
    cpu_s = statistics.fmean(step.cpu_s for step in counted)
    wall_s = statistics.fmean(step.wall_s for step in counted)
    total_s = sum(parts.values())
    print(f"{'':<12}{'cpu ms a step':>14}{'of cpu':>10}{'of wall':>10}")
    for name, seconds in [*parts.items(), ("all", total_s)]:
        print(f"{name:<12}{1e3 * seconds:>14.2f}{seconds / cpu_s:>10.3%}{seconds / wall_s:>10.3%}")
    result = {
        "bench": "telemetry", "load": round(os.getloadavg()[0], 2), "samples": 512, "steps": len(counted),
        "step_cpu_s": round(cpu_s, 3), "step_wall_s": round(wall_s, 3), "calls_a_step": round(calls, 1),
        "spans_a_step": round(spans / steps, 1), "replica_us_a_call": round(1e6 * per_call_s, 1),
        "trace_bytes_a_step": round(trace_bytes / steps),
        "cpu_ms_a_step": {name: round(1e3 * seconds, 3) for name, seconds in parts.items()},
        "share_of_cpu": round(total_s / cpu_s, 5), "share_of_wall": round(total_s / wall_s, 5),
        "reached": {"under 1 % of the step's CPU time": total_s < 0.01 * cpu_s},
    }  # fmt: skip
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
