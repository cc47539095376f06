"""What each switch of the adaptive policy brings: turned off one at a time, on the real loop in virtual time.

python bench/ablation.py [--steps 8]

Cases of the test-bed of bench/reproduction.py (16 L40S), each with two goals: the knee, and the cheapest that is as
fast as `rlhfless` (cost). A cell is time and GPU-seconds of all steps against those with everything on, in per cent:
+5 / -2 is 5 % more time and 2 % fewer GPU-seconds without it. "unmet": no plan meets the deadline without it.
docs/planner.md has the table.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np

from orchestrator.planner.policies import ADAPTIVE, Policy
from orchestrator.planner.scaling import Goal, Objective, Unmet
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


OBJECTIVES: Sequence[Objective] = ("knee", "cost")
SWITCHES = (
    Switch("nothing", {}),
    Switch("chosen shards: balanced alone", {"shards": "balanced"}),
    Switch("chosen shards: similar alone", {"shards": "similar"}),
    Switch("cut (and tail function)", {"cut": "never"}),
    Switch("tail function", {"tail_function": False}),
    Switch("moved keys and values", {}, recomputed),
    Switch("fusion (and streamed training)", {"fuse": "no", "stream": False}),
    Switch("streamed training (and chosen ranks)", {"stream": False}),
    Switch("keeping over idle times", {"keep": "none"}),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    steps, begin_s = parser.parse_args().steps, time.process_time()
    result: dict[str, dict[str, Any]] = {switch.name: {} for switch in SWITCHES}
    for objective in OBJECTIVES:
        for model, recipe, data in CASES:
            scenario = replace(scenarios.rlhfless_testbed(model, recipe, data), steps=steps)
            deadline_s = float(np.mean(simulate(scenario, RLHFLESS).step_s)) if objective == "cost" else None
            compare(scenario, Goal(objective, deadline_s=deadline_s), result)
    cases = [*result[SWITCHES[0].name]]
    print("\n| without | " + " | ".join(cases) + " |\n|" + "---|" * (len(cases) + 1))
    for name, row in result.items():
        if name != SWITCHES[0].name:
            cells = ["unmet" if row[c] is None else f"{row[c][0]:+.0f} / {row[c][1]:+.0f}" for c in cases]
            print(f"| {name} | " + " | ".join(cells) + " |")
    print(json.dumps({"bench": "ablation", "steps": steps, "cpu_s": round(time.process_time() - begin_s), **result}))


if __name__ == "__main__":
    main()
