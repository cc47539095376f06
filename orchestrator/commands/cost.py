"""Replica-seconds and dollars of a run by function and step; beside them the same on reserved machines."""

from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.table import Table

from functions.base.wire import Json
from orchestrator.base.errors import RunError
from orchestrator.commands.arguments import json_output, print_json, run_directory
from orchestrator.commands.status import read_metrics
from orchestrator.run.directory import RunDirectory
from orchestrator.run.ledger import Books, Cost, read_books, total
from orchestrator.session.terminal_view import dollars, duration, number, spending
from orchestrator.simulation.reserved import update_reserved

HELP = "replica-seconds and dollars by function and step"
EXAMPLE = "rlhf-orchestrate cost arithmetic --json"


def arguments(parser: ArgumentParser) -> None:
    run_directory(parser)
    json_output(parser)


def execute(given: Namespace) -> int:
    directory = RunDirectory.open(given.run)
    books = books_of(directory)
    reserved, spared_s = update_reserved(directory), not_waited_s(directory)
    if given.json:
        print_json(cost_json(books, reserved) | {"not_waited_s": spared_s})
    else:
        Console().print(cost_table(books, reserved), highlight=False)
        if directory.job.environment is not None:
            unit = "GPU" if directory.job.function("generate").gpus else "replica"
            print(f"{number(spared_s)} {unit}-seconds did not wait for tools.")
    return 0


def not_waited_s(directory: RunDirectory) -> float:
    """GPU-seconds (without GPUs: replica-seconds) for which replicas of generate were let go while episodes waited for
    their environment; until the generation's end, for which a server would have held them."""
    rows = read_metrics(directory.path / "metrics.jsonl")
    each = max(1, directory.job.function("generate").gpus)
    return each * sum(float(row.get("rollout/let_go_s", 0.0)) for row in rows)


def cost_json(books: Books, reserved: Json) -> Json:
    """What `cost_table` shows: seconds and dollars. `reserved`: orchestrator/simulation/reserved.py."""
    return {
        "usd": books.usd,
        "wall_s": books.wall_s,
        "executions": books.executions,
        "functions": {name: asdict(cost) for name, cost in books.functions.items()},
        "steps": [step.to_json() for step in books.steps],
        "reserved": reserved,
    }


def books_of(directory: RunDirectory) -> Books:
    """Raises RunError where nothing was written yet."""
    path = directory.path / "cost.json"
    books = read_books(path)
    if books is None:
        raise RunError(f"{path}: not there yet; it is written from the first step on")
    return books


def cost_table(books: Books, reserved: Json) -> RenderableType:
    """By function, and by step; GPU-seconds and dollars where there are any."""
    whole = total(books.functions)
    functions = Table("function", box=SIMPLE, title="functions", title_justify="left")
    units = (["GPU s"] if whole.gpu_s else []), (["USD"] if whole.usd else [])
    parked = ["parked s"] if whole.parked_s else []
    for title in ("replica s", "busy s", "busy", *units[0], "starts", *parked, *units[1]):
        functions.add_column(title, justify="right")
    for name, cost in books.functions.items():
        functions.add_row(name, *_cells(cost, whole))
    functions.add_section()
    functions.add_row("all", *_cells(whole, whole))
    names = list(books.functions)
    steps = Table(box=SIMPLE, title="steps: replica seconds by function", title_justify="left")
    for title in ("step", "wall s", *names, *units[1]):
        steps.add_column(title, justify="right")
    for step in books.steps:
        seconds = (f"{step.functions.get(name, Cost()).replica_s:.1f}" for name in names)
        steps.add_row(str(step.step), f"{step.wall_s:.1f}", *seconds, *([dollars(step.usd)] if whole.usd else []))
    times = "once" if books.executions == 1 else f"{books.executions} times"
    spent = f"{spending(whole.usd, whole.replica_s)} in {duration(books.wall_s)}, started {times}"
    return Group(functions, steps, spent, *reserved_lines(reserved))


def reserved_lines(reserved: Json) -> list[str]:
    """The same steps on machines that are held, and how this run compares; what that assumes stands behind it."""
    if "why" in reserved:
        return []
    used = reserved["used"]
    key = next((key for key in ("usd", "gpu_s") if used[key]), "replica_s")
    unit = "GPU" if key == "gpu_s" else "replica"
    show = dollars if key == "usd" else lambda value: f"{number(value)} {unit}-seconds"
    lines = [f"Simulated on reserved machines, steps 0 to {reserved['steps']} (this run: {show(used[key])}):"]
    for place in ("dedicated", "colocated"):
        held = reserved[place]
        change = used[key] / held[key] - 1
        lines.append(
            f"  {place}: {show(held[key])} in {duration(held['wall_s'])}, {held['machines']}; "
            f"this run took {abs(change):.0%} {'less' if change < 0 else 'more'}"
        )
    return lines


def _cells(cost: Cost, whole: Cost) -> list[str]:
    busy = f"{cost.busy_s / cost.replica_s:.0%}" if cost.replica_s else "-"
    seconds = [f"{cost.replica_s:.1f}", f"{cost.busy_s:.1f}", busy, *([f"{cost.gpu_s:.1f}"] if whole.gpu_s else [])]
    parked = [f"{cost.parked_s:.1f}"] if whole.parked_s else []
    return [*seconds, str(cost.starts), *parked, *([dollars(cost.usd)] if whole.usd else [])]
