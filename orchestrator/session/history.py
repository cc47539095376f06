"""What a run that was made tells about the next one: its steps as a planner learns from them.

journal/     which prompts each step drew, its metrics
trace.json   the responses' lengths, each call's time, counts and cold start
"""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from functions.base.wire import Json
from orchestrator.base.errors import RunError
from orchestrator.base.outages import Outages
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.job.config import JobConfig
from orchestrator.job.data import Cursor
from orchestrator.job.prompts import Draw, PromptSource
from orchestrator.planner.base import CallObservation, PastStep, Waits
from orchestrator.run.directory import RunDirectory
from orchestrator.run.journal import Journal, Record
from orchestrator.session.plan_request import prompts_of
from orchestrator.session.recorder import metrics_of
from orchestrator.telemetry.trace import JOB, read_spans

_START = "planner/start_s/"


def finished_steps(run: RunDirectory, source: PromptSource) -> list[PastStep]:
    """Raises RunError where the run has no finished step, or was of other data."""
    job = run.job
    store = AsyncExchange(run.open_exchange(job), outages=Outages(0.0))
    records = asyncio.run(Journal.open(store)).records
    if len(records) > 1 and records[0].history["data"] != source.digest:
        raise RunError(f"{run.path}: was trained on other data than this job's: its lengths say nothing here")
    found = recorded_steps(job, run.path / "trace.json", records, source)
    if not found:
        raise RunError(f"{run.path}: has no finished step with its calls: nothing to predict by")
    return found


def recorded_steps(job: JobConfig, trace: Path, records: Sequence[Record], source: PromptSource) -> list[PastStep]:
    """Those steps of the journal that the trace knows too. Raises RunError for a trace that is none."""
    spans = _steps(trace)
    found: list[PastStep] = []
    for before, record in itertools.pairwise(records):
        seen = spans.get(record.step)
        if seen is None or not seen.lengths:
            continue
        drawn = Draw(source, Cursor.from_json(before.history["cursor"]), job.data.prompts_per_step).next()
        started = {name.removeprefix(_START) for name in metrics_of(record) if name.startswith(_START)}
        cold = {call.function for call in seen.calls if call.cold}
        if len(drawn.tokens) != len(seen.lengths):
            raise RunError(
                f"{trace}: step {record.step} has the lengths of {len(seen.lengths)} prompts, "
                f"the journal says that it drew {len(drawn.tokens)}"
            )
        found.append(
            PastStep(
                record.step,
                prompts_of(drawn, job),
                seen.lengths,
                seen.calls,
                frozenset(cold - started),
                seen.stop_s - seen.start_s,
                {name: Waits(**told) for name, told in seen.waits.items()},
            )
        )
    return found


@dataclass(frozen=True)
class _Step:
    """A step as the trace has it; seconds since the job's start."""

    start_s: float
    stop_s: float
    lengths: Sequence[Sequence[int]]
    calls: list[CallObservation]
    waits: Json


def _steps(path: Path) -> dict[int, _Step]:
    """By number; each with the calls that began in its time."""
    found: dict[int, _Step] = {}
    spans = read_spans(path)
    for process, lane, event in spans:
        if (process, lane) == (JOB, "step"):
            start_s, args = event["ts"] / 1e6, event["args"]
            step = _Step(start_s, start_s + event["dur"] / 1e6, args.get("lengths", []), [], args.get("waits", {}))
            found[int(event["name"].removeprefix("step "))] = step
    for process, lane, event in spans:
        if process != JOB and event["name"] != "replica":
            begun_s = event["ts"] / 1e6
            within = next((s for s in found.values() if s.start_s <= begun_s <= s.stop_s), None)
            if within is not None:
                within.calls.append(_call(process, lane, event))
    return found


def _call(function: str, replica: str, event: Json) -> CallObservation:
    args = event["args"]
    return CallObservation(
        function=function,
        replica=replica,
        operation=event["name"],
        cold="start_s" in args,
        start_s=args.get("start_s", 0.0),
        work_s=event["dur"] / 1e6,
        prompt_tokens=args.get("prompt_tokens", 0),
        response_tokens=args.get("response_tokens", 0),
        samples=args.get("samples", 0),
        stop_s=(event["ts"] + event["dur"]) / 1e6,
        stats=args,
    )
