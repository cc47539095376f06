"""`rlhf-orchestrate report RUN`: the dashboard's page of one run as one HTML file, with its data in it.

The data are the API's own answers, thinned out as for a page; of samples, those of a few steps, evenly spread.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from functions.base.logs import LogLine
from functions.base.wire import Json
from orchestrator.api.desired import Desired
from orchestrator.api.jobs import Job
from orchestrator.api.launch import OUTPUT
from orchestrator.api.page import report_page
from orchestrator.api.redact import redacted
from orchestrator.api.routes import detail
from orchestrator.api.summary import SummaryFile
from orchestrator.api.view_routes import checkpoints_of, cost_of, health_of, metrics_of, samples_of, where_of
from orchestrator.api.views.costs import NO_BOOKS, cost_columns
from orchestrator.api.views.log import event_page, last_lines
from orchestrator.api.views.plan import plan_of
from orchestrator.api.views.reserved import read_reserved
from orchestrator.api.views.tail import Tails
from orchestrator.api.views.texts import PREFIX, Kind, kept_steps, read_samples
from orchestrator.api.views.thin import Names
from orchestrator.api.views.timeline import Timelines
from orchestrator.base.files import writing
from orchestrator.run.directory import RunDirectory
from orchestrator.run.ledger import read_books
from orchestrator.telemetry.now import FILE as NOW
from orchestrator.telemetry.now import read_now

POINTS = 600
BINS = 1500
LANES = 12_000
"""Rectangles of the Gantt chart, and where the whole job has more, of its last steps."""
SAMPLE_STEPS, SAMPLES = 12, 64
EVENTS = 500
PLANS = 200
LINES = 60


def write_report(run: Path, output: Path | None) -> Path:
    """Writes the report of a run directory to `output` (None: report.html in it). Raises RunError."""
    directory = RunDirectory.open(run)
    file = output or directory.path / "report.html"
    text = report_page(f"{directory.path.resolve().name} · rlhf-orchestrate report", report_data(directory))
    with writing(file):
        file.write_text(text)
    return file


def report_data(directory: RunDirectory) -> Json:
    """What web/app/source.js reads. Raises RunError for files of the run that cannot be read."""

    path, tails = directory.path.resolve(), Tails()
    alive = directory.holder() is not None
    summary = SummaryFile(path / "events.jsonl").read()
    job = Job(path.name, Desired.read(path), directory.job, summary, alive, read_now(path / NOW))
    books = read_books(path / "cost.json")
    rows = tails.read(path / "metrics.jsonl")
    planned = tails.read(path / "plans.jsonl")
    steps = evenly(sorted({line["step"] for line in planned}), PLANS)
    page = event_page(tails.read(path / "events.jsonl"), None, None, EVENTS)
    return {
        "made_at": time.time(),
        "job": detail(job),
        "metrics": metrics_of(rows, Names().of(path, rows), (), 0, None, POINTS),
        "cost": cost_of(books, steps=False),
        "cost_steps": cost_columns(books or NO_BOOKS, POINTS),
        "reserved": read_reserved(path),
        "health": health_of(job.config, rows),
        "where": where_of(job.config, rows[-PLANS:]),
        "replicas": _timelines(path, job.config.function, alive),
        "plans": [plan_of(planned, rows, step) for step in steps],
        "samples": {of: _samples(path / "samples", of) for of in PREFIX},
        "events": json.loads(redacted(json.dumps(page["events"]))),
        "checkpoints": checkpoints_of(job, path),
        "output": {"lines": [redacted(str(LogLine.parse(line))) for line in last_lines(path / OUTPUT, LINES)]},
    }


def _timelines(path: Path, function: Callable[[str], Any], alive: bool) -> list[Json]:
    """The finest first: lanes of the whole job, or of as many last steps as there is room for; then counts of it."""

    timelines = Timelines()

    def window(from_s: float, most: int) -> Json:
        return timelines.window(
            path, lambda name: function(name).replicas, from_s=from_s, to_s=None, bins=BINS, most=most, alive=alive
        )

    whole = window(0.0, LANES)
    if whole["lanes"]:
        return [whole, window(0.0, 0)]
    from_s = whole["end_s"]
    fine: list[Json] = []
    for _, start_s, _ in reversed(whole["steps"]):
        found = window(start_s, LANES)
        if not found["lanes"]:
            break
        fine, from_s = [found], start_s
    return [*fine, whole] if from_s < whole["end_s"] else [whole]


def _samples(folder: Path, of: Kind) -> list[Json]:

    tails = Tails()
    return [
        {"step": step, "samples": (found := read_samples(tails, folder, step, of)[:SAMPLES]), **samples_of(found)}
        for step in evenly(kept_steps(folder, of), SAMPLE_STEPS)
    ]


def evenly(values: Sequence[int], most: int) -> list[int]:
    """At most `most` of them, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[(len(values) - 1) * k // (most - 1)] for k in range(most)]
