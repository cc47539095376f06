"""The least GPU-seconds that a step could take at 0.9x of a reserved cluster whose tensor parallelism is the best.

    python bench/least.py [CASE ...]

Both columns know all lengths, and nothing starts, loads, publishes or waits.

    work   any schedule: the passes that are not generation; of generation what grows with samples and tokens, at the
           size of replica where it is least, and as many decode steps as the longest response has, at the sizes that
           are least in GPU-seconds and still end in time; more where so many do not fit the replicas' slots
    ways   of the ways that the planner has: so many replicas of one size, equal work or runs of similar length, the
           tail moved at any of its cuts to replicas of the same or of a larger size, all of it over in time

Virtual time; the mean of two steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.reproduction import other_gpu_s, sceptic_cases
from orchestrator.planner.devices import kv_capacity_tokens
from orchestrator.planner.latency import GenerateCost, generate_prior, kv_token_steps
from orchestrator.planner.static import balance
from orchestrator.planner.tail import ShardState, Tail, TailFunction
from orchestrator.simulation.baselines import SERVERFUL
from orchestrator.simulation.job import simulate
from orchestrator.simulation.scenario import Scenario

Array = npt.NDArray[np.float64]
SIZES = (1, 2, 4, 8)
"""GPUs of a replica of generate."""
SLOWER = 0.9


def work_gpu_s(scenario: Scenario, lengths: Array, seconds: float) -> float:
    """Of generation."""
    costs = {size: _cost(scenario, size) for size in SIZES}
    prompts = np.full(lengths.shape, float(scenario.prompt_tokens + scenario.head_tokens))
    held, groups = float(kv_token_steps(prompts, lengths).sum()), len(lengths)
    computed = scenario.head_tokens + groups * scenario.prompt_tokens
    linear = min(
        size * (c.prefill_token_s * computed + c.sequence_s * lengths.sum() + c.kv_token_s * held)
        for size, c in costs.items()
    )
    longest, least = float(lengths.max()), np.inf
    for size, c in costs.items():  # the longest is decoded at two sizes at most: a linear programme of two rows
        for wide, w in costs.items():
            slow, fast = longest * c.step_s, longest * w.step_s
            if min(slow, fast) > seconds:
                continue
            share = 1.0 if slow <= seconds else (seconds - fast) / (slow - fast)
            least = min(least, share * size * slow + (1 - share) * wide * fast)
    more = max(0.0, float(lengths.sum()) / scenario.slots - longest) * min(s * c.step_s for s, c in costs.items())
    return float(linear + least + more)


def ways_gpu_s(scenario: Scenario, lengths: Array, seconds: float) -> float:
    """Of generation."""
    return min((gpu_s for time_s, gpu_s in _ways(scenario, lengths) if time_s <= seconds), default=np.inf)


def _ways(scenario: Scenario, lengths: Array) -> Iterator[tuple[float, float]]:
    """Seconds and GPU-seconds of each."""
    n = lengths.shape[1]
    order = np.argsort(-lengths.max(axis=1), kind="stable")
    for size in SIZES:
        cost, kv = _cost(scenario, size), kv_capacity_tokens(scenario.device, scenario.model, size)
        for count in range(1, scenario.gpus // size + 1):
            for dealt in (balance(lengths.mean(axis=1).tolist(), count), np.array_split(order, count)):
                shards = [_shard(scenario, cost, lengths, np.asarray(rows), n) for rows in dealt]
                for wide in SIZES:
                    if wide < size:
                        continue
                    function = None
                    if wide > size:
                        wide_kv = kv_capacity_tokens(scenario.device, scenario.model, wide)
                        wide_cost, most = _cost(scenario, wide), scenario.gpus // wide
                        function = TailFunction(wide_cost.moved, scenario.slots, wide_kv, 0.0, most, wide, size, None)
                    tail = Tail(shards, cost, max_batch=scenario.slots, kv_tokens=kv, function=function)
                    for choice in tail.to_function() if function else tail.moved():
                        yield choice.time_s, size * choice.replica_s + wide * choice.tail_s


def _shard(scenario: Scenario, cost: GenerateCost, lengths: Array, rows: npt.NDArray[np.int64], n: int) -> ShardState:
    prompt = float(scenario.prompt_tokens + scenario.head_tokens)
    own = np.sort(lengths[rows].ravel())[::-1]
    computed = scenario.head_tokens + len(rows) * scenario.prompt_tokens
    return ShardState.of(np.full(len(own), prompt), own, cost, scenario.slots, computed)


def _cost(scenario: Scenario, size: int) -> GenerateCost:
    return generate_prior(scenario.device, scenario.model, size, link_gb_s=scenario.link_gb_s)


def least(base: Scenario) -> dict[str, Any]:
    held = [simulate(replace(base, generate_gpus=size, tail_gpus=None, steps=2), SERVERFUL) for size in SIZES]
    best = min(range(len(held)), key=lambda k: np.mean(held[k].step_s))
    found: dict[str, list[float]] = {"work": [], "ways": []}
    for seconds, gpu_s, step in zip(held[best].step_s, held[best].gpu_s, held[best].plans, strict=True):
        lengths = np.array([*step.report.lengths.values()], dtype=np.float64)
        other = other_gpu_s(base, lengths)
        found["work"].append((other + work_gpu_s(base, lengths, seconds / SLOWER)) / gpu_s)
        found["ways"].append((other + ways_gpu_s(base, lengths, seconds / SLOWER)) / gpu_s)
    row = {"case": base.name, "tp": SIZES[best], "serverful_s": float(np.mean(held[best].step_s))}
    row |= {name: round(100 * (float(np.mean(each)) - 1), 1) for name, each in found.items()}
    print(f"{base.name:26} TP{row['tp']} {row['serverful_s']:8.1f} {row['work']:+8.1f} {row['ways']:+8.1f}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", help="names that begin so; none: all")
    wanted = tuple(parser.parse_args().case) or ("",)
    print(f"{'case':26} {'best':3} {'serverful s':>8} {'work %':>8} {'ways %':>8}")
    rows = [least(base) for base in sceptic_cases() if base.name.startswith(wanted)]
    print(json.dumps({"bench": "least", "rows": rows}))


if __name__ == "__main__":
    main()
