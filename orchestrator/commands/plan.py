"""What a step and the job will take and cost, as tables.

plan job.toml                      by the roofline of [planner] gpu
plan job.toml --run runs/job       by what a run of the job took
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.table import Table

from orchestrator.commands.arguments import job_file, json_output, print_json, run_path
from orchestrator.commands.forecast import Forecast, Life, forecast
from orchestrator.job.config import JobConfig, load_job
from orchestrator.planner.base import StepPlan
from orchestrator.run.directory import RunDirectory
from orchestrator.session.session import prepare
from orchestrator.session.terminal_view import dollars, duration, number

HELP = "what a step and the job will take and cost"
EXAMPLE = "rlhf-orchestrate plan job.toml --run runs/arithmetic"


def arguments(parser: ArgumentParser) -> None:
    job_file(parser)
    parser.add_argument("--run", type=run_path, help="directory of a run of this job to predict by")
    json_output(parser)


def execute(given: Namespace) -> int:
    job = load_job(given.job, given.overrides)
    found = forecast(prepare(job), None if given.run is None else RunDirectory.open(given.run))
    if given.json:
        print_json(plan_json(found))
    else:
        Console().print(plan_table(job, found), highlight=False)
    return 0


def plan_json(found: Forecast) -> dict[str, Any]:
    """What `plan_table` shows; of a step: seconds and dollars."""
    steps = {
        name: {"time_s": plan.predicted_step_s, "cost_usd": plan.predicted_cost_usd, "generate_replicas": plan.chosen}
        for name, plan in (("first_step", found.first), ("later_steps", found.steady))
    }
    return {
        "predicted_from": found.basis,
        "unknown": list(found.unknown),
        **steps,
        "job": {"time_s": found.job_s, "cost_usd": found.job_usd},
        "not_waited_s": not_waited_s(found) if found.steady.waits else 0.0,
        "replicas": [asdict(life) for life in found.lives],
        "curve": [asdict(point) for point in found.curve],
    }


def plan_table(job: JobConfig, found: Forecast) -> RenderableType:
    unit = unit_of(job)
    head = Table.grid(padding=(0, 2))
    head.add_row("job", f"{job.name} ({job.recipe}), {job.steps} steps, policy {job.planner.policy}{_goal(job)}")
    head.add_row("predicted from", found.basis)
    if found.unknown:
        head.add_row("not in it", f"{', '.join(found.unknown)}: nothing is known of the time they take")
    head.add_row("first step", _step(found.first, unit))
    head.add_row("later steps", _step(found.steady, unit))
    for name, waits in found.steady.waits.items():
        median, late = (waits.answer_s[int(q * (len(waits.answer_s) - 1))] for q in (0.5, 0.99))
        head.add_row(
            f"tools {name}".rstrip(), f"an answer takes {number(median)} s at the median, {number(late)} s at p99"
        )
    if found.steady.waits:
        spared_s, gpus = not_waited_s(found), max(1, job.function("generate").gpus)
        kind = "GPU" if job.function("generate").gpus else "replica"
        head.add_row("", f"{number(spared_s * gpus)} {kind}-seconds of a step do not wait for tools")
    priced = f", {dollars(found.job_usd)}" if unit == "USD" else ""
    head.add_row("job", f"{duration(found.job_s)}{priced}, without validation")
    if unit != "USD" and not any(f.gpus for f in job.functions.values()):
        head.add_row("cost", "not known: no prices are set (functions.<name>.usd_per_hour)")
    replicas = Table("function", "replicas over a later step", box=SIMPLE)
    for name in dict.fromkeys(life.function for life in found.lives):
        changes = steps_of([life for life in found.lives if life.function == name])
        replicas.add_row(name, ", ".join(f"{count} at {at_s:.3g} s" for at_s, count in changes))
    curve = Table(box=SIMPLE, title="replicas of generate", title_justify="left")
    for title in ("N", "T(N) s", f"C(N) {unit}", ""):
        curve.add_column(title, justify="right")
    for point in found.curve:
        cost = point.cost_usd if unit == "USD" else point.gpu_s
        mark = "<- chosen" if point is found.chosen else ""
        curve.add_row(str(point.replicas), number(point.time_s), number(cost), mark)
    return Group(head, replicas, curve)


def not_waited_s(found: Forecast) -> float:
    """Replica-seconds of generate in a later step that a server would hold until the last episode is over."""
    end_s = found.steady.generated_s or 0.0
    return sum(max(0.0, end_s - life.stop_s) for life in found.lives if life.function == "generate")


def steps_of(lives: Sequence[Life]) -> list[tuple[float, int]]:
    """When the number of replicas changes, and to what."""
    count, found = 0, dict[float, int]()
    edges = [(life.start_s, 1) for life in lives] + [(life.stop_s, -1) for life in lives]
    for at_s, change in sorted(edges):
        count += change
        found[at_s] = count
    return list(found.items())


def unit_of(job: JobConfig) -> str:
    """Dollars where the job names prices, else GPU-seconds."""
    return "USD" if any(f.usd_per_hour for f in job.functions.values()) else "GPU s"


def _goal(job: JobConfig) -> str:
    planner = job.planner
    goal: list[str] = [] if planner.policy == "static" else [planner.objective or "knee"]
    goal += [] if planner.deadline_s is None else [f"deadline {planner.deadline_s:g} s"]
    goal += [] if planner.budget_usd is None else [f"budget {dollars(planner.budget_usd)}"]
    return f" ({', '.join(goal)})" if goal else ""


def _step(plan: StepPlan, unit: str) -> str:
    chosen = next(point for point in plan.curve if point.replicas == plan.chosen)
    cost = dollars(chosen.cost_usd) if unit == "USD" else f"{number(chosen.gpu_s)} GPU s"
    return f"{number(plan.predicted_step_s)} s, {cost}"
