"""Planner policies side by side, on the real loop in virtual time.

simulate 3b-grpo-gpqa                        the built-in scenarios are listed by `simulate list`
simulate my.toml --policy adaptive --steps 30  a scenario of your own (orchestrator/simulation/scenarios.py)
simulate runs/job                            a run that was made, again: its lengths, its functions' measured times
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from orchestrator.base.errors import ConfigError, RunError
from orchestrator.commands.arguments import json_output, print_json, run_path
from orchestrator.planner.policies import ADAPTIVE
from orchestrator.planner.scaling import OBJECTIVES, Goal, Unmet
from orchestrator.run.directory import RunDirectory
from orchestrator.session.terminal_view import number
from orchestrator.simulation.baselines import POLICIES, SERVERFUL
from orchestrator.simulation.job import Outcome, simulate
from orchestrator.simulation.lengths import Turns
from orchestrator.simulation.replay import replay
from orchestrator.simulation.scenario import Scenario
from orchestrator.simulation.scenarios import find_scenario, names

HELP = "policies side by side, in virtual time"
EXAMPLE = "rlhf-orchestrate simulate 3b-grpo-gpqa --policy adaptive"
BASE = SERVERFUL.name
"""What the others are compared with."""
DECIDES = ADAPTIVE.name
"""The policy that decides by what was asked for."""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("scenario", help="a built-in scenario, a TOML file, a run's directory, or `list`")
    parser.add_argument(
        "--policy", action="append", choices=tuple(POLICIES), help="compare only these with serverful (repeatable)"
    )
    parser.add_argument("--objective", choices=OBJECTIVES, default="knee", help="what `adaptive` decides for")
    parser.add_argument("--deadline-s", type=float, help="a step of `adaptive` may not take longer")
    parser.add_argument("--budget-usd", type=float, help="a step of `adaptive` may not cost more")
    parser.add_argument("--steps", type=int, help="instead of the scenario's")
    json_output(parser)


def execute(given: Namespace) -> int:
    if given.scenario == "list":
        print("\n".join(names()))
        return 0
    path = run_path(given.scenario)
    scenario = replay(RunDirectory.open(path)) if path.is_dir() else find_scenario(given.scenario)
    if given.steps is not None:
        if given.steps < 1:
            raise ConfigError(f"--steps: got {given.steps} (wants >= 1)")
        scenario = replace(scenario, steps=given.steps)
    try:
        goal = Goal(given.objective, given.deadline_s, given.budget_usd)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    others = [name for name in POLICIES if name != BASE and (given.policy is None or name in given.policy)]
    if DECIDES not in others and goal != Goal():
        raise ConfigError(
            f"--objective, --deadline-s and --budget-usd are for {DECIDES}, which is not among the policies"
        )
    try:
        outcomes = [
            simulate(scenario, scenario.adapted(POLICIES[name]), goal=goal if name == DECIDES else None)
            for name in (BASE, *others)
        ]
    except Unmet as error:
        raise RunError(f"planner: {error}") from None
    if given.json:
        print_json([_outcome_json(scenario, outcome) for outcome in outcomes])
    else:
        Console().print(outcome_table(scenario, outcomes), highlight=False)
    return 0


def outcome_table(scenario: Scenario, outcomes: Sequence[Outcome]) -> Table:
    """Means over all steps; the first outcome is what the others are compared with."""
    title = f"{scenario.name}: {scenario.gpus} x {scenario.device.name}, {len(outcomes[0].step_s)} steps"
    table = Table("policy", box=SIMPLE, title=title, title_justify="left")
    for column in ("step s", "speed", f"{scenario.unit} s a step", f"against {outcomes[0].policy}", "USD a step"):
        table.add_column(column, justify="right")
    episodes = isinstance(scenario.lengths, Turns)
    if episodes:
        table.add_column(f"{scenario.unit} s not held for tools", justify="right")
    base_s, base_gpu_s = _means(outcomes[0])
    for outcome in outcomes:
        step_s, gpu_s = _means(outcome)
        usd = _usd(scenario, outcome)
        change = f"{100 * (gpu_s / base_gpu_s - 1):+.1f} %"
        table.add_row(
            outcome.policy,
            number(step_s),
            f"{base_s / step_s:.2f} x",
            number(gpu_s),
            change,
            "-" if usd is None else number(usd),
            *([number(not_waited_s(scenario, outcome))] if episodes else []),
        )
    return table


def _outcome_json(scenario: Scenario, outcome: Outcome) -> dict[str, Any]:
    """Means over all steps; the first outcome is what the others are compared with."""
    step_s, gpu_s = _means(outcome)
    seconds = "step_gpu_s" if scenario.unit == "GPU" else "step_replica_s"
    usd = _usd(scenario, outcome)
    found = {"policy": outcome.policy, "steps": len(outcome.step_s), "step_s": step_s, seconds: gpu_s, "step_usd": usd}
    return found | ({"not_waited_s": not_waited_s(scenario, outcome)} if isinstance(scenario.lengths, Turns) else {})


def not_waited_s(scenario: Scenario, outcome: Outcome) -> float:
    """GPU-seconds of a step for which replicas of generate were let go while episodes waited (commands/cost.py); none
    where all GPUs are held."""
    if POLICIES[outcome.policy].colocated:
        return 0.0
    apart = [result for result in outcome.plans if not result.plan.turns]
    let_go_s = sum(result.report.observed.get("rollout/let_go_s", 0.0) for result in apart)
    return scenario.generate_gpus * let_go_s / len(outcome.plans)


def _usd(scenario: Scenario, outcome: Outcome) -> float | None:
    """Of a step; by the price of a GPU, or by those of a run's functions."""
    price = scenario.device.usd_per_hour
    if price is not None:
        return _means(outcome)[1] * price / 3600.0
    usd = scenario.usd(outcome.usage, outcome.plans[-1].stop_s)
    return None if usd is None else usd / len(outcome.step_s)


def _means(outcome: Outcome) -> tuple[float, float]:
    steps = len(outcome.step_s)
    return sum(outcome.step_s) / steps, outcome.total_gpu_s / steps
