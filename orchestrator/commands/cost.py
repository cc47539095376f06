"""Replica-seconds and dollars of a run by function and step; beside them, what holding every function would cost."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.table import Table

from functions.base.wire import Json
from orchestrator.base.errors import RunError
from orchestrator.commands.arguments import json_output, print_json, run_directory
from orchestrator.run.directory import RunDirectory
from orchestrator.run.ledger import Books, Cost, read_books, total
from orchestrator.session.terminal_view import dollars, duration

HELP = "replica-seconds and dollars by function and step"
EXAMPLE = "rlhf-orchestrate cost arithmetic --json"


def arguments(parser: ArgumentParser) -> None:
    run_directory(parser)
    json_output(parser)


def execute(given: Namespace) -> int:
    directory = RunDirectory.open(given.run)
    if given.json:
        print_json(cost_json(books_of(directory)))
    else:
        print_cost(directory)
    return 0


def cost_json(books: Books) -> Json:
    """What `cost_table` shows: seconds and dollars."""
    return {
        "usd": books.usd,
        "serverful_usd": total(books.serverful).usd,
        "wall_s": books.wall_s,
        "executions": books.executions,
        "functions": {name: asdict(cost) for name, cost in books.functions.items()},
        "serverful": {name: asdict(cost) for name, cost in books.serverful.items()},
        "steps": [step.to_json() for step in books.steps],
    }


def books_of(directory: RunDirectory) -> Books:
    """Raises RunError where nothing was written yet."""
    path = directory.path / "cost.json"
    books = read_books(path)
    if books is None:
        raise RunError(f"{path}: not there yet; it is written from the first step on")
    return books


def print_cost(directory: RunDirectory, console: Console | None = None) -> None:
    """What the run has cost until now. Raises RunError where nothing was written yet."""
    (console or Console()).print(cost_table(books_of(directory)), highlight=False)


def cost_table(books: Books) -> RenderableType:
    """By function, and by step; the serverful counterfactual beside them."""
    functions = Table("function", box=SIMPLE, title="functions", title_justify="left")
    for title in ("replica s", "busy s", "busy", "GPU s", "starts", "USD", "serverful USD"):
        functions.add_column(title, justify="right")
    for name, cost in books.functions.items():
        functions.add_row(name, *_cells(cost, books.serverful.get(name, Cost())))
    functions.add_section()
    whole, held = total(books.functions), total(books.serverful)
    functions.add_row("all", *_cells(whole, held))
    names = list(books.functions)
    steps = Table(box=SIMPLE, title="steps: replica seconds by function", title_justify="left")
    for title in ("step", "wall s", *names, "USD"):
        steps.add_column(title, justify="right")
    for step in books.steps:
        seconds = (f"{step.functions.get(name, Cost()).replica_s:.1f}" for name in names)
        steps.add_row(str(step.step), f"{step.wall_s:.1f}", *seconds, dollars(step.usd))
    share = f": {whole.usd / held.usd:.0%} of what holding every function would have cost" if held.usd else ""
    times = "once" if books.executions == 1 else f"{books.executions} times"
    return Group(functions, steps, f"{dollars(whole.usd)} in {duration(books.wall_s)}, started {times}{share}")


def _cells(cost: Cost, held: Cost) -> list[str]:
    busy = f"{cost.busy_s / cost.replica_s:.0%}" if cost.replica_s else "-"
    seconds = [f"{cost.replica_s:.1f}", f"{cost.busy_s:.1f}", busy, f"{cost.gpu_s:.1f}"]
    return [*seconds, str(cost.starts), dollars(cost.usd), dollars(held.usd)]
