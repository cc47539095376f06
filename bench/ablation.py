"""What each switch of the adaptive policy brings: turned off one at a time, on the real loop in virtual time.

python bench/ablation.py testbed [--steps 8] [--objectives knee speed cost]
python bench/ablation.py job [--steps 10] [--repeats 3] [--objectives knee cost]

testbed: cases of the test-bed of bench/reproduction.py (16 L40S), each with the goals knee, speed and cost: the
cheapest that is as fast as `rlhfless`. A cell is time and GPU-seconds of all steps against those with everything on, in
per cent: +5 / -2 is 5 % more time and 2 % fewer GPU-seconds without it. "unmet": no plan meets the deadline without it.
job: the arithmetic example with 16 samples a prompt, as real processes on the local platform; step seconds and
replica-seconds against a run with everything on beside it, medians. docs/planner.md has both tables.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.jobs import ROOT
from bench.planner_truth import Measured, measure
from orchestrator.commands.main import main as command_line
from orchestrator.planner.policies import ADAPTIVE, Policy
from orchestrator.planner.scaling import OBJECTIVES, Goal, Objective, Unmet
from orchestrator.simulation import scenarios
from orchestrator.simulation.baselines import RLHFLESS
from orchestrator.simulation.functions import Generate, Model
from orchestrator.simulation.job import simulate
from orchestrator.simulation.scenario import Scenario

CASES: Sequence[tuple[str, str, str]] = (
    ("Qwen2.5-7B", "grpo", "gpqa"),
    ("Qwen2.5-7B", "grpo", "gsm8k"),
    ("Qwen2.5-7B", "grpo", "livecodebench"),
    ("Qwen2.5-3B", "grpo", "gpqa"),
    ("Qwen2.5-7B", "ppo", "gpqa"),
)


@dataclass(frozen=True)
class Recomputed(Scenario):
    """A scenario in which the keys and values of a cut's samples are computed again."""

    def models(self, policy: Policy) -> dict[str, Model]:
        return {
            name: replace(m, cost=replace(m.cost, moved_token_s=None)) if isinstance(m, Generate) else m
            for name, m in super().models(policy).items()
        }


def recomputed(scenario: Scenario) -> Scenario:
    return Recomputed(**vars(scenario))


@dataclass(frozen=True)
class Switch:
    """What is off: of the policy, or of what is simulated."""

    name: str
    policy: Mapping[str, Any]
    scenario: Callable[[Scenario], Scenario] = lambda scenario: scenario
    loads_ahead: bool = True


SWITCHES = (
    Switch("nothing", {}),
    Switch("chosen shards: balanced alone", {"shards": "balanced"}),
    Switch("chosen shards: similar alone", {"shards": "similar"}),
    Switch("cut (and tail function)", {"cut": "never"}),
    Switch("tail function", {"tail_function": False}),
    Switch("moved keys and values", {}, recomputed),
    Switch("fusion (and streamed training)", {"fuse": "no", "stream": False}),
    Switch("streamed training (and chosen ranks)", {"stream": False}),
    Switch("prewarm", {"prewarm": False}),
    Switch("load-ahead", {}, loads_ahead=False),
    Switch("deltas", {}, lambda scenario: replace(scenario, delta_fraction=1.0)),
)


def measured(scenario: Scenario, goal: Goal, switch: Switch) -> tuple[float, float] | None:
    """Mean seconds and GPU-seconds of a step; None where no plan meets the goal."""
    hints: AbstractContextManager[object] = nullcontext()
    if not switch.loads_ahead:  # replicas find no hint of what to load
        hints = patch("orchestrator.simulation.platform.hinted", return_value=[])
    try:
        with hints:
            outcome = simulate(switch.scenario(scenario), replace(ADAPTIVE, **switch.policy), goal=goal)
    except Unmet:
        return None
    return float(np.mean(outcome.step_s)), outcome.total_gpu_s / len(outcome.step_s)


def compare(scenario: Scenario, goal: Goal, result: Mapping[str, dict[str, Any]]) -> None:
    """Of one case, into `result`: by switch, by case."""
    case, whole = f"{scenario.name}, {goal.objective}", None
    for switch in SWITCHES:
        found = measured(scenario, goal, switch)
        whole = whole or found
        if found is None or whole is None:
            cell, result[switch.name][case] = "unmet", None
        elif switch is SWITCHES[0]:
            cell, result[switch.name][case] = f"{found[0]:.1f} s, {found[1]:.0f} GPU-s", found
        else:
            change = [round(100 * (f / w - 1), 1) for f, w in zip(found, whole, strict=True)]
            cell, result[switch.name][case] = f"{change[0]:+.1f} / {change[1]:+.1f}", change
        print(f"{case:28} {switch.name:38} {cell}", flush=True)


def testbed(steps: int, objectives: Sequence[Objective]) -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = {switch.name: {} for switch in SWITCHES}
    for objective in objectives:
        for model, recipe, data in CASES:
            scenario = replace(scenarios.rlhfless_testbed(model, recipe, data), steps=steps)
            deadline_s = float(np.mean(simulate(scenario, RLHFLESS).step_s)) if objective == "cost" else None
            compare(scenario, Goal(objective, deadline_s=deadline_s), result)
    return result


IN_JOB = [switch for switch in SWITCHES if switch.name not in ("tail function", "moved keys and values", "deltas")]
"""What is switched in the orchestrator, and in use by a job without GPUs in float32."""


def as_switched(name: str) -> None:
    """The command line in this process, without the switch."""
    switch = next(switch for switch in SWITCHES if switch.name == name)
    with (
        patch("orchestrator.session.job_planner.ADAPTIVE", replace(ADAPTIVE, **switch.policy)),
        nullcontext() if switch.loads_ahead else patch("orchestrator.step.preload.Preload._loads", return_value=[]),
    ):
        raise SystemExit(command_line())


def job(steps: int, objectives: Sequence[Objective], repeats: int) -> dict[str, dict[str, Any]]:
    """Each repeat runs all switches, one after the other; what counts are ratios within a repeat."""
    result: dict[str, dict[str, Any]] = {switch.name: {} for switch in IN_JOB}
    settings = [f"steps={steps}", "rollout.n=16"]
    for objective in objectives:
        runs: list[dict[str, Measured]] = []
        with tempfile.TemporaryDirectory() as directory:
            for repeat in range(repeats):
                runs.append({})
                for switch in IN_JOB:
                    found = runs[-1][switch.name] = measure(
                        ROOT / "examples" / "arithmetic" / "job.toml",
                        Path(directory) / f"{objective}-{repeat}-{len(runs[-1])}", "adaptive",
                        [*settings, f"planner.objective={objective}"], [__file__, "as", switch.name],
                    )  # fmt: skip
                    print(f"{objective:6} {switch.name:38} {found.step_s:.3f} s, {found.replica_s:.1f} s", flush=True)
        case = f"arithmetic, {objective}"
        whole, names = [run[IN_JOB[0].name] for run in runs], ("step_s", "replica_s")
        result[IN_JOB[0].name][case] = [
            statistics.median(getattr(m, n) for m in whole) for n in ("step_s", "replica_s")
        ]
        for switch in IN_JOB[1:]:
            result[switch.name][case] = [
                round(100 * (statistics.median(getattr(r[switch.name], n) / getattr(w, n) for r, w in pairs) - 1), 1)
                for pairs in [list(zip(runs, whole, strict=True))]
                for n in names
            ]
    return result


def main() -> None:
    if sys.argv[1:2] == ["as"]:
        name, sys.argv[1:] = sys.argv[2], sys.argv[3:]
        as_switched(name)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["testbed", "job"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=["knee", "cost"])
    given, begin_s = parser.parse_args(), time.process_time()
    result = (
        testbed(given.steps, given.objectives)
        if given.what == "testbed"
        else job(given.steps, given.objectives, given.repeats)
    )
    cases = [*result[SWITCHES[0].name]]
    print("\n| without | " + " | ".join(cases) + " |\n|" + "---|" * (len(cases) + 1))
    for name, row in result.items():
        if name != SWITCHES[0].name:
            cells = ["unmet" if row[c] is None else f"{row[c][0]:+.0f} / {row[c][1]:+.0f}" for c in cases]
            print(f"| {name} | " + " | ".join(cells) + " |")
    figures = {"steps": given.steps, "cpu_s": round(time.process_time() - begin_s), **result}
    print(json.dumps({"bench": f"ablation {given.what}", **figures}))


if __name__ == "__main__":
    main()
