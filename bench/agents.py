"""An agentic step against a server that holds its GPUs while tools work: seconds and GPU-seconds of a step.

Scenario 7b-grpo-tools (orchestrator/simulation/scenarios.py) over a few seeds, on the real loop in virtual time.
`held`: all GPUs are held and functions take turns on them, as on a reserved cluster. `bound`: what no server is faster
than, the slowest episode's waits and nothing else. Step 1 begins cold and knows nothing of episodes: it is left out.

python bench/agents.py [--seeds 3] [--steps 5]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from orchestrator.planner.scaling import Goal
from orchestrator.simulation.baselines import POLICIES, SERVERFUL
from orchestrator.simulation.job import simulate
from orchestrator.simulation.lengths import Turns
from orchestrator.simulation.scenario import Scenario
from orchestrator.simulation.scenarios import agents

ROWS = {"held": (SERVERFUL, Goal()), "speed": (POLICIES["adaptive"], Goal("speed"))}


def bound_s(turns: Turns, scenario: Scenario, step: int) -> float:
    """The longest that an episode of a step waits for its tools, in all."""
    keys = [(g, i) for g in range(scenario.prompts_per_step) for i in range(scenario.samples_per_prompt)]
    return max(sum(turns.answer_s(step, g, i, k) for k in range(1, turns.count(step, g, i))) for g, i in keys)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()
    sums = {name: [0.0, 0.0] for name in ROWS}
    print(f"{'seed':>4} {'policy':>6} {'step s':>8} {'GPU s':>8} {'time':>6} {'GPU':>6}   against held")
    bounds = 0.0
    for seed in range(given.seeds):
        scenario = replace(agents(seed), steps=given.steps)
        assert isinstance(scenario.lengths, Turns), "of agents"
        bounds += sum(bound_s(scenario.lengths, scenario, step) for step in range(2, given.steps + 1))
        base = (1.0, 1.0)
        for name, (policy, goal) in ROWS.items():
            done = simulate(scenario, policy, goal=goal)
            found = (sum(done.step_s[1:]) / (given.steps - 1), sum(done.gpu_s[1:]) / (given.steps - 1))
            base = found if name == "held" else base
            sums[name] = [a + b for a, b in zip(sums[name], found, strict=True)]
            ratios = f"{found[0] / base[0]:6.2f} {found[1] / base[1]:6.2f}"
            print(f"{seed:4} {name:>6} {found[0]:8.1f} {found[1]:8.0f} {ratios}", flush=True)
    held = sums["held"]
    told = {name: {"time": s[0] / held[0], "gpu_s": s[1] / held[1]} for name, s in sums.items()}
    told["bound"] = {"time": bounds / (given.steps - 1) / held[0]}
    for name, ratio in told.items():
        print(f" all {name:>6} " + ", ".join(f"{key} {value:.3f}" for key, value in ratio.items()))
    print(json.dumps(told))


if __name__ == "__main__":
    main()
