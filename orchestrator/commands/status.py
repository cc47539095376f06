"""How far a run has come, its last steps and where their time went: from the files of its directory, at any time."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from functions.call.train_params import rollout_bound
from orchestrator.base.errors import RunError
from orchestrator.commands.arguments import json_output, print_json, run_directory
from orchestrator.job.config import JobConfig
from orchestrator.recipes.settings import rollout_diff
from orchestrator.run.directory import PROFILE, RunDirectory, profiles_of
from orchestrator.run.events import END_TYPES, FILE, read_events
from orchestrator.run.ledger import Books, read_books, total
from orchestrator.session.terminal_view import duration, number, sparkline, spending
from orchestrator.telemetry.headline import HEADLINES, headline
from orchestrator.telemetry.health import Sign, health
from orchestrator.telemetry.validation import PREFIX, validation_names
from orchestrator.telemetry.where import WORDS, advice, parts_of

HELP = "how far a run has come"
EXAMPLE = "rlhf-orchestrate status arithmetic"
LAST_STEPS = 10
BAR = 36
LEVELS = {"warn": "yellow", "bad": "red"}
COLORS = {
    "starting": "magenta", "loading": "yellow", "reading": "cyan", "generating": "blue", "tail": "bright_blue",
    "scoring": "green", "training": "red", "publishing": "bright_cyan", "idle": "bright_black",
}  # fmt: skip


def arguments(parser: ArgumentParser) -> None:
    run_directory(parser)
    json_output(parser)


def execute(given: Namespace) -> int:
    directory = RunDirectory.open(given.run)
    if given.json:
        print_json(status(directory))
    else:
        print_status(directory)
    return 0


def status(directory: RunDirectory) -> dict[str, Any]:
    """What `print_status` shows, for programs; `metrics`: of the last step."""
    job, path = directory.job, directory.path
    rows, books = read_metrics(path / "metrics.jsonl"), read_books(path / "cost.json")
    state, reason = state_of(directory, rows)
    return {
        "job": job.name,
        "recipe": job.recipe,
        "state": state,
        "reason": reason,
        "step": rows[-1]["step"] if rows else None,
        "steps": job.steps,
        "cost_usd": None if books is None else books.usd,
        "replica_s": None if books is None else total(books.functions).replica_s,
        "wall_s": None if books is None else books.wall_s,
        "metrics": rows[-1] if rows else {},
        "profiles": [str(path) for path in profiles_of(directory.path)],
        "step_time_s": parts_of(rows[-1]) if rows else {},
        "advice": advice_of(job, rows[-1]) if rows else "",
        "health": [asdict(sign) for sign in signs_of(job, rows)],
    }


def state_of(directory: RunDirectory, rows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """running, finished, failed, cancelled, killed or new; and why, or what to do."""
    holder = directory.holder()
    if holder is not None:
        return "running", f"process {holder}"
    events, _ = read_events(directory.path / FILE)
    last = next((event for event in reversed(events) if event.type in END_TYPES or event.type == "started"), None)
    go_on = f"go on with `rlhf-orchestrate resume {directory.path}`"
    if last is not None and last.type == "failed":
        return "failed", f"{last.data['message']}\nonce that is mended, {go_on}"
    if rows and rows[-1]["step"] >= directory.job.steps:
        return "finished", ""
    if last is not None and last.type == "started":
        return "killed", f"its orchestrator ended without a word; {go_on}"
    return ("cancelled" if last is not None and last.type == "cancelled" else "stopped"), go_on


def print_status(directory: RunDirectory, console: Console | None = None) -> None:
    """How far the run has come. Raises RunError for files that cannot be read."""
    job = directory.job
    rows = read_metrics(directory.path / "metrics.jsonl")
    books = read_books(directory.path / "cost.json")
    kind, reason = state_of(directory, rows)
    state = f"running ({reason})" if kind == "running" else f"{kind}: {reason}" if reason else kind
    console = console or Console()
    console.print(status_table(job, state, rows, books), soft_wrap=False, highlight=False)
    if found := profiles_of(directory.path):
        console.print(
            f"profiled calls, for https://ui.perfetto.dev: {len(found)} in {directory.path / PROFILE}/", highlight=False
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


def advice_of(job: JobConfig, row: Mapping[str, Any]) -> str:
    """What would make the step of these metrics faster."""
    return advice(row, policy=job.planner.policy, warm=job.planner.keep_warm)


def signs_of(job: JobConfig, rows: Sequence[Mapping[str, Any]]) -> list[Sign]:
    """Whether the run learns as it should."""
    return health(rows, rollout_bound(rollout_diff(job), job.model.dtype))


def status_table(job: JobConfig, state: str, rows: Sequence[Mapping[str, Any]], books: Books | None) -> RenderableType:
    """Where the job stands, and its last steps."""
    head = Table.grid(padding=(0, 2))
    head.add_row("job", f"{job.name} ({job.recipe})")
    head.add_row("state", state)
    head.add_row("step", f"{rows[-1]['step'] if rows else '-'} of {job.steps}")
    validations = validation_names({name for row in rows for name in row})
    for column in validations:
        values = [float(row[column]) for row in rows if column in row]
        head.add_row(column, f"{values[0]:.3f} -> {values[-1]:.3f}  {sparkline(values)}")
    if books is not None:
        head.add_row("cost", f"{spending(books.usd, total(books.functions).replica_s)} in {duration(books.wall_s)}")
    for sign in signs_of(job, rows):
        if sign.level != "good":
            head.add_row("look at", Text(f"{sign.name} {sign.value}: {sign.reason}", LEVELS[sign.level]))
    if rows and (parts := parts_of(rows[-1])):
        head.add_row("last step", bar(parts))
        head.add_row("", advice_of(job, rows[-1]))
    followed = headline({name for row in rows for name in row}) or "critic/score/mean"
    columns = {
        HEADLINES[followed]: followed,
        "length": "response_length/mean",
        "kl": "actor/kl_loss",
        "kl in reward": "actor/reward_kl_penalty",
        "ppo kl": "actor/ppo_kl",
        "grad norm": "actor/grad_norm",
        "tok/s a generate replica": "rollout/tokens_per_s",
        "step s": "timing_s/step",
    }
    table = Table(box=SIMPLE)
    table.add_column("step", justify="right")
    shown = {title: key for title, key in columns.items() if any(key in row for row in rows)}
    tested = ["validation"] if len(validations) == 1 else [name.removeprefix(PREFIX) for name in validations]
    for title in (*shown, *tested):
        table.add_column(title, justify="right")
    for row in rows[-LAST_STEPS:]:
        table.add_row(str(row["step"]), *(number(row.get(key)) for key in (*shown.values(), *validations)))
    return Group(head, table) if rows else head


def bar(parts: Mapping[str, float]) -> Text:
    """Where a step's time went: the whole BAR blocks wide, then each part in words, the largest first."""
    step_s, text, end = sum(parts.values()), Text(), 0.0
    for part, seconds in parts.items():
        begin, end = end, end + BAR * seconds / (step_s or 1.0)
        text.append("█" * (round(end) - round(begin)), COLORS[part])
    named = sorted((item for item in parts.items() if item[1] > 0), key=lambda item: -item[1])
    words = [(f"{WORDS.get(part, part)} {duration_s(seconds)}", COLORS[part]) for part, seconds in named]
    return text.append("  ").append(Text(", ").join(Text(*one) for one in words))


def duration_s(seconds: float) -> str:
    """`0.42 s`, `12:05`."""
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s" if seconds < 60 else duration(seconds)
