"""How far a run has come and its last steps, from the files of its directory: while the job runs and after it."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.table import Table

from orchestrator.base.errors import RunError
from orchestrator.commands.arguments import run_directory
from orchestrator.run.directory import RunDirectory
from orchestrator.run.ledger import Books, read_books
from orchestrator.session.terminal_view import dollars, duration, number, sparkline

HELP = "how far a run has come"
LAST_STEPS = 10
arguments = run_directory


def execute(given: Namespace) -> int:
    print_status(RunDirectory.open(given.run))
    return 0


def print_status(directory: RunDirectory, console: Console | None = None) -> None:
    """How far the run has come. Raises RunError for files that cannot be read."""
    job = directory.job
    rows = read_metrics(directory.path / "metrics.jsonl")
    books = read_books(directory.path / "cost.json")
    holder = directory.holder()
    step = int(rows[-1]["step"]) if rows else None
    state = (
        f"running (process {holder})" if holder is not None
        else "finished" if step is not None and step >= job.steps
        else f"stopped; go on with `rlhf-orchestrate resume {directory.path}`"
    )  # fmt: skip
    (console or Console()).print(
        status_table(job.name, job.recipe, state, job.steps, rows, books), soft_wrap=False, highlight=False
    )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, one per step; a last line that is being written is left out."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error
    rows: list[dict[str, Any]] = []
    for place, entry in enumerate(text.splitlines(keepends=True), start=1):
        if not entry.endswith("\n"):
            break
        try:
            row = json.loads(entry)
            row["step"] = int(row["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path}:{place}: not a line of metrics ({error!r})") from error
        rows.append(row)
    return rows


def status_table(
    name: str, recipe: str, state: str, steps: int, rows: Sequence[Mapping[str, Any]], books: Books | None
) -> RenderableType:
    """Where the job stands, and its last steps."""
    head = Table.grid(padding=(0, 2))
    head.add_row("job", f"{name} ({recipe})")
    head.add_row("state", state)
    head.add_row("step", f"{rows[-1]['step'] if rows else '-'} of {steps}")
    validations = validation_columns(rows)
    for column in validations:
        values = [float(row[column]) for row in rows if column in row]
        head.add_row(column, f"{values[0]:.3f} -> {values[-1]:.3f}  {sparkline(values)}")
    if books is not None:
        head.add_row("cost", f"{dollars(books.usd)} in {duration(books.wall_s)}")
    columns = {
        "reward": "critic/score/mean",
        "length": "response_length/mean",
        "kl": "actor/ppo_kl",
        "grad norm": "actor/grad_norm",
        "tok/s": "perf/throughput",
        "step s": "timing_s/step",
    }
    table = Table(box=SIMPLE)
    table.add_column("step", justify="right")
    shown = {title: key for title, key in columns.items() if any(key in row for row in rows)}
    for title in (*shown, *validations):
        table.add_column(title, justify="right")
    for row in rows[-LAST_STEPS:]:
        table.add_row(str(row["step"]), *(number(row.get(key)) for key in (*shown.values(), *validations)))
    return Group(head, table) if rows else head


def validation_columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """verl's `val-core/<data source>/acc/mean@n`, in the order of their names."""
    return sorted({key for row in rows for key in row if key.startswith("val-core/") and "/acc/" in key})
