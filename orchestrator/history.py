"""What a run that was made tells about the next one: its steps as a planner learns from them.

journal/       which prompts each step drew, its metrics       samples/   lengths of the samples that were kept
trace.json     each call's time, and generate's own counts
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from functions.wire import Json
from orchestrator.data import Cursor
from orchestrator.dataflow import PromptSet
from orchestrator.errors import RunError
from orchestrator.journal import Journal, Record
from orchestrator.planner.adaptive import AdaptivePlanner
from orchestrator.planner.base import CallObservation, Prompt
from orchestrator.prompts import Draw, PromptSource
from orchestrator.recorder import metrics_of
from orchestrator.run_directory import RunDirectory
from orchestrator.store import Store
from orchestrator.telemetry.trace import JOB, read_events

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Finished:
    """A committed step."""

    prompts: Sequence[Prompt]
    kept: Mapping[int, Sequence[int]]
    """Response lengths by prompt_id, of the samples that were kept."""
    lengths: Array
    """Of all samples: those kept, repeated to the step's count and scaled to its mean. [S]"""
    prompt_tokens: float
    """Of all samples, added up."""
    calls: Sequence[CallObservation]


def teach(planner: AdaptivePlanner, steps: Sequence[Finished], cap: int) -> None:
    """Tells the planner what it would have learned had it planned these steps."""
    for step in steps:
        planner.lengths.predict(step.prompts, cap)
        planner.lengths.observe(step.kept)
        planner.learned.observe(step.calls, step.lengths, step.prompt_tokens)


def finished_steps(run: RunDirectory, source: PromptSource) -> list[Finished]:
    """Raises RunError where the run has no finished step, or was of other data."""
    job = run.job
    store = Store(run.open_exchange(job), patience_s=0.0)
    records = asyncio.run(_records(store))
    calls = _calls(run.path / "trace.json")
    if len(records) < 2 or not calls:
        raise RunError(f"{run.path}: has no finished step with its calls: nothing to predict by")
    if records[0].history["data"] != source.digest:
        raise RunError(f"{run.path}: was trained on other data than this job's: its lengths say nothing here")
    found: list[Finished] = []
    for before, record in itertools.pairwise(records):
        metrics = metrics_of(record)
        if "perf/total_num_tokens" in metrics and "response_length/mean" in metrics:
            draw = Draw(source, Cursor.from_json(before.history["cursor"]), job.data.prompts_per_step)
            texts = _texts(run.path / "samples" / f"{record.step:06d}.jsonl")
            found.append(_finished(metrics, calls.get(record.step, ()), draw, texts))
    return found


async def _records(store: Store) -> list[Record]:
    return (await Journal.open(store)).records


def _finished(
    metrics: Mapping[str, float], calls: Sequence[CallObservation], draw: Draw, texts: Sequence[Json]
) -> Finished:
    drawn = draw.next()
    kept: dict[int, list[int]] = {}
    rows, prompts = list(drawn.rows), prompts_of(drawn)
    for text in texts:
        while text["group"] >= len(rows):  # recipes that draw again number on
            more = draw.next()
            rows += more.rows
            prompts += prompts_of(more)
        kept.setdefault(rows[text["group"]]["prompt_id"], []).append(text["tokens"])
    mean, prompt = metrics["response_length/mean"], metrics["prompt_length/mean"]
    count = max(1, round(metrics["perf/total_num_tokens"] / (mean + prompt)))
    known = np.array([n for values in kept.values() for n in values] or [1], dtype=np.float64)
    lengths = np.resize(known, count)
    cold = {f.removeprefix(_START): s for f, s in metrics.items() if f.startswith(_START)}
    seen: list[CallObservation] = []
    for call in calls:
        start_s = cold.pop(call.function, None)  # the step's mean, told once
        seen.append(
            CallObservation(
                call.function, call.replica, call.operation, start_s is not None, start_s or 0.0, call.work_s,
                round(prompt), 0, 1, call.stop_s, call.stats,
            )
        )  # fmt: skip
    return Finished(prompts, kept, lengths * (mean / lengths.mean()), count * prompt, seen)


_START = "planner/start_s/"


def prompts_of(drawn: PromptSet) -> list[Prompt]:
    return [
        Prompt(group, row["prompt_id"], tuple(tokens), row["data_source"])
        for group, tokens, row in zip(drawn.groups, drawn.tokens, drawn.rows, strict=True)
    ]


def _calls(path: Path) -> dict[int, list[CallObservation]]:
    """By step, those of its time; cold starts and tokens are not in a trace."""
    events = read_events(path)
    process = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    lane = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    steps: list[tuple[int, int, int]] = []
    spans: list[Json] = []
    for event in events:
        if event["ph"] != "X":
            continue
        if process[event["pid"]] != JOB:
            spans += [event] if event["name"] != "replica" else []
        elif lane[event["pid"], event["tid"]] == "step":
            steps.append((int(event["name"].removeprefix("step ")), event["ts"], event["ts"] + event["dur"]))
    found: dict[int, list[CallObservation]] = {}
    for span in spans:
        step = next((k for k, start, stop in steps if start <= span["ts"] <= stop), None)
        if step is not None:
            found.setdefault(step, []).append(
                CallObservation(
                    process[span["pid"]], lane[span["pid"], span["tid"]], span["name"], False, 0.0, span["dur"] / 1e6,
                    0, 0, 1, (span["ts"] + span["dur"]) / 1e6, span["args"],
                )
            )  # fmt: skip
    return found


def _texts(path: Path) -> list[Json]:
    """Empty where the run kept no samples."""
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except ValueError as error:
        raise RunError(f"{path}: cannot be read: {error}") from error
