"""The seeds' claims on the real loop in virtual time: tables of policies side by side. docs/reproduction.md reads them.

python bench/reproduction.py sceptic      25 s from nothing, 0.625 GB/s a GPU; the baseline at its best tensor size
python bench/reproduction.py testbed      RLHFless's test-bed: 16 L40S, 3B and 7B, PPO and GRPO, three data sets
python bench/reproduction.py level        its GRPO cases with the baseline's own time as deadline
python bench/reproduction.py tensor       one case with 1, 2 and 4 GPUs to a replica of generate; of 2, 4, 8 of its tail
python bench/reproduction.py bounds       the test-bed's cases: what no schedule can beat
python bench/reproduction.py assumed      two cases of it with slower links, cold starts and next versions
python bench/reproduction.py rounds       RollPacker's tail batching beside them, 20 steps
python bench/reproduction.py cluster      70B on 160 H100: 512 samples a step
python bench/reproduction.py fusion       RLHFuse's setting: R_t from 1 to 60 %, fusion on and off
python bench/reproduction.py loop_fusion  the same in the real loop, on 64 GPUs and without pipelines
python bench/reproduction.py placement    HybridFlow: placements from 16 to 128 A100
python bench/reproduction.py schedules    RLHFuse's published fused pipeline schedules
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.papers.fused_rollout import System, best_tensor, fused, in_turn
from bench.papers.fused_training import Trained, train
from bench.papers.mapping import fixed_mapping, map_models
from bench.papers.mapping_costs import HYBRIDFLOW, RLHFUSE, Batch, Role
from bench.papers.schedules import greedy
from bench.papers.tail_batching import NAME, Rounds, tail_batching
from functions.train.schedules import Pipelines, search
from orchestrator.planner.devices import device, shape
from orchestrator.planner.policies import ADAPTIVE, Policy
from orchestrator.planner.scaling import Goal, Unmet
from orchestrator.simulation import scenarios
from orchestrator.simulation.baselines import POLICIES, SERVERFUL
from orchestrator.simulation.functions import Work
from orchestrator.simulation.job import Outcome, simulate
from orchestrator.simulation.lengths import Lognormal
from orchestrator.simulation.scenario import Scenario

Array = npt.NDArray[np.float64]

Run = tuple[str, str, Goal | str]
"""Label, policy, and its goal: or the cheapest that is as fast as the policy of that label, whose mean step is the
deadline."""
RUNS: Sequence[Run] = (
    ("serverful", "serverful", Goal()),
    ("rlhfuse", "rlhfuse", Goal()),
    ("rlhfless", "rlhfless", Goal()),
    ("adaptive, knee", "adaptive", Goal("knee")),
    ("adaptive, speed", "adaptive", Goal("speed")),
    ("adaptive, cost", "adaptive", "rlhfless"),
)
LEVEL: Run = ("adaptive, level", "adaptive", "serverful")


def compare(
    scenario: Scenario, runs: Sequence[Run] = RUNS, before: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:  # fmt: skip
    """`before`: rows, the first of which all are compared with."""
    rows = [*before]
    for label, name, wanted in runs:
        begin = time.process_time()
        goal = wanted
        if isinstance(goal, str):
            goal = Goal("cost", deadline_s=next(r["step_s"] for r in rows if r["policy"] == goal))
        try:
            outcome = simulate(scenario, POLICIES[name], goal=goal)
        except Unmet as error:
            print(f"{scenario.name:24} {label:15} {error}", flush=True)
            continue
        rows.append(row(scenario, label, outcome, rows) | {"cpu_s": round(time.process_time() - begin, 1)})
        print(
            f"{scenario.name:24} {label:15} {rows[-1]['step_s']:8.1f} {rows[-1]['speed']:6.2f} "
            f"{rows[-1]['gpu_s']:8.0f} {rows[-1]['gpu_s_change_pct']:+7.1f} {rows[-1]['error_pct']:7.1f}",
            flush=True,
        )
    return rows[len(before) :]


def row(scenario: Scenario, label: str, outcome: Outcome | Rounds, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Speed and GPU-seconds against the first row, over all steps (the first epoch, without history, included)."""
    step_s, gpu_s = float(np.mean(outcome.step_s)), outcome.total_gpu_s / len(outcome.step_s)
    base = rows[0] if rows else {"step_s": step_s, "gpu_s": gpu_s}
    metrics = outcome.metrics[5:] if isinstance(outcome, Outcome) else ()
    errors = [m["planner/error/step"] for m in metrics if "planner/error/step" in m]
    return {
        "case": scenario.name,
        "policy": label,
        "step_s": round(step_s, 2),
        "speed": round(base["step_s"] / step_s, 3),
        "gpu_s": round(gpu_s, 1),
        "gpu_s_change_pct": round(100 * (gpu_s / base["gpu_s"] - 1), 1),
        "error_pct": round(100 * float(np.median(errors)), 1) if errors else 0.0,
    }


def head() -> None:
    print(f"{'case':24} {'policy':15} {'step s':>8} {'speed':>6} {'GPU-s':>8} {'%':>7} {'error %':>7}")


def testbed() -> list[dict[str, Any]]:
    head()
    return [
        found
        for recipe in ("grpo", "ppo")
        for model in ("Qwen2.5-3B", "Qwen2.5-7B")
        for data in scenarios.DATA
        for found in compare(scenarios.rlhfless_testbed(model, recipe, data), [r for r in RUNS if r[0] != "rlhfuse"])
    ]


def level() -> list[dict[str, Any]]:
    """The test-bed's GRPO cases with the baseline's own time as deadline (PPO with 3B cannot meet it)."""
    head()
    cases = [(model, data) for model in ("Qwen2.5-3B", "Qwen2.5-7B") for data in scenarios.DATA]
    return [
        found
        for model, data in cases
        for found in compare(scenarios.rlhfless_testbed(model, "grpo", data), [RUNS[0], LEVEL])
    ]


def tensor() -> list[dict[str, Any]]:
    """Cases with replicas of generate on more GPUs each: a baseline tuned for the time of its longest response."""
    head()
    rows: list[dict[str, Any]] = []
    for data in ("gsm8k", "gpqa"):
        for gpus, tails in ((1, (2, 4, 8)), (2, (4, 8)), (4, (None,))):
            for tail in tails:
                scenario = rlhfless(data, gpus, tail)
                rows += compare(scenario, RUNS if tail == tails[0] else [RUNS[0], *RUNS[3:5]])
    return rows


PARKED = {"back_s": 1.4, "leave_s": 1.0, "node_gb_s": 12.0}
"""Processes stay on their nodes: docs/reproduction.md says where each number comes from."""


def sceptic_cases() -> list[Scenario]:
    """RLHFless's test-bed, and two cases whose longest response of a step is 10 to 15 times the mean; nothing parks."""
    cases = [
        scenarios.rlhfless_testbed(model, recipe, data, process_s=25.0)
        for model in ("Qwen2.5-7B", "Qwen2.5-3B")
        for recipe in ("grpo", "ppo")
        for data in scenarios.DATA
    ]
    for case in (cases[1], cases[4]):
        long: dict[str, Any] = {"lengths": Lognormal.of(300.0, 1.0), "max_response_length": 4096}
        cases.append(replace(case, name=case.name.replace("gpqa", "long tail"), **long))
    return [replace(case, link_gb_s=0.625) for case in cases]


def sceptic() -> list[dict[str, Any]]:
    """Slow links and cold starts; everything parks. The first row of each case is the baseline at the tensor
    parallelism that is best for it; with 7B, `adaptive` also at that of RLHFless's test-bed."""
    head()
    rows: list[dict[str, Any]] = []
    for base in sceptic_cases():
        held = [replace(base, generate_gpus=gpus, name=f"{base.name} TP{gpus}") for gpus in (1, 2, 4, 8)]
        tuned = sorted((row(s, "serverful", simulate(s, SERVERFUL), []) for s in held), key=lambda r: r["step_s"])
        for rest in tuned:
            print(f"{rest['case']:24} {'serverful':15} {rest['step_s']:8.1f} {'':6} {rest['gpu_s']:8.0f}", flush=True)
        saving = ("adaptive, 0.9x", "adaptive", Goal("cost", deadline_s=tuned[0]["step_s"] / 0.9))
        found = tuned[:1]
        parts: list[tuple[int, int | None, list[Run]]] = [(4, 8, [RUNS[4], saving])]
        if found[0]["case"].endswith("8"):
            parts.append((8, None, [RUNS[4], saving]))
        if base.name.startswith("7B grpo"):
            parts.append((1, 4, [RUNS[2], *RUNS[3:5]]))
        for gpus, tail, runs in parts:
            changes: dict[str, Any] = {"generate_gpus": gpus, "tail_gpus": tail, **PARKED}
            found += compare(replace(base, **changes, name=f"{base.name} TP{gpus}"), runs, found)
        rows += [*found, *tuned[1:]]
    return rows


def rlhfless(data: str, generate_gpus: int, tail_gpus: int | None) -> Scenario:
    scenario = scenarios.rlhfless_testbed("Qwen2.5-7B", "grpo", data)
    name = f"7B {data} TP{generate_gpus}, tail {tail_gpus or '-'}"
    return replace(scenario, name=name, generate_gpus=generate_gpus, tail_gpus=tail_gpus)


def bounds() -> list[dict[str, Any]]:
    """What no schedule on these GPUs can beat: the serverful generation without its reshard, and all work that
    is not generation spread evenly over all GPUs."""
    print(f"{'case':24} {'serverful s':>11} {'generate s':>11} {'other GPU-s':>12} {'speed at most':>14}")
    rows: list[dict[str, Any]] = []
    for model in ("Qwen2.5-3B", "Qwen2.5-7B"):
        for recipe in ("grpo", "ppo"):
            for data in scenarios.DATA:
                rows.append(bound(replace(scenarios.rlhfless_testbed(model, recipe, data), steps=5)))
    return rows


def bound(scenario: Scenario) -> dict[str, Any]:
    outcome = simulate(scenario, SERVERFUL)
    other, generate_s = list[float](), list[float]()
    for step in outcome.plans:
        end_s = max(call.stop_s for call in step.report.calls if call.function == "generate")
        generate_s.append(end_s - step.start_s - scenario.reshard_s)
        other.append(other_gpu_s(scenario, np.array([*step.report.lengths.values()])))
    step_s, least_s, other_s = (float(np.mean(each)) for each in (outcome.step_s, generate_s, other))
    best = max(least_s, other_s / scenario.gpus)
    print(f"{scenario.name:24} {step_s:11.1f} {least_s:11.1f} {other_s:12.0f} {step_s / best:14.2f}", flush=True)
    return {
        "case": scenario.name,
        "step_s": step_s,
        "generate_s": least_s,
        "other_gpu_s": other_s,
        "bound": step_s / best,
    }


def other_gpu_s(scenario: Scenario, lengths: npt.NDArray[Any]) -> float:
    """Of a step's passes that are not generation, without what calls take for themselves."""
    tokens = float(lengths.sum()) + lengths.size * (scenario.prompt_tokens + scenario.head_tokens)
    passes = {"reference": 2 if scenario.critics else 1, "critic": 1, "train": 1, "train-critic": 1}
    gpus = {spec.name: spec.gpus for spec in scenario.specs(ADAPTIVE)}
    return sum(
        passes[name] * gpus[name] * work.cost.token_s * tokens
        for name, work in scenario.models(ADAPTIVE).items()
        if isinstance(work, Work) and name in passes
    )


def assumed() -> list[dict[str, Any]]:
    """What the results hang on: GB/s of a GPU's link to the exchange, seconds of a process's start, the share of a
    version's time that a delta takes."""
    head()
    rows: list[dict[str, Any]] = []
    for data in ("gsm8k", "gpqa"):
        scenario = scenarios.rlhfless_testbed("Qwen2.5-7B", "grpo", data)
        for key, value in (
            ("delta_fraction", 0.1), ("delta_fraction", 1.0), ("link_gb_s", 2.0), ("link_gb_s", 0.625),
            ("process_s", 5.0), ("process_s", 25.0),
        ):  # fmt: skip
            changes: dict[str, Any] = {key: value, "name": f"{data} {key} {value:g}"}
            rows += compare(replace(scenario, **changes), [RUNS[0], *RUNS[2:5]])
    return rows


def rounds() -> list[dict[str, Any]]:
    """20 steps, of which tail batching makes four long rounds."""
    head()
    rows: list[dict[str, Any]] = []
    for model in ("Qwen2.5-3B", "Qwen2.5-7B"):
        for data in scenarios.DATA:
            scenario = replace(scenarios.rlhfless_testbed(model, "grpo", data), steps=20)
            found = compare(scenario, [RUNS[0], *RUNS[3:5]])
            rows += [*found, row(scenario, NAME, tail_batching(scenario), found)]
            step_s, speed, gpu_s = (rows[-1][column] for column in ("step_s", "speed", "gpu_s"))
            print(f"{scenario.name:24} {NAME:15} {step_s:8.1f} {speed:6.2f} {gpu_s:8.0f}", flush=True)
    return rows


def cluster() -> list[dict[str, Any]]:
    """With a baseline whose replicas have as many GPUs as the tail's too; and with 10 us for each all-reduce of NVLink
    beside what the roofline's shares, fitted to 4 GPUs, have in them."""
    head()
    whole = replace(scenarios.rlhfless_cluster(), steps=8)
    rows = compare(whole)
    rows += compare(replace(whole, name="70B TP8", generate_gpus=8, tail_gpus=None))
    slow = replace(whole, name="70B, 10 us a reduce", device=replace(whole.device, allreduce_s=10e-6))
    return rows + compare(slow)


# RLHFuse's pairs of actor and critic, and the pipeline stages of each size: the times and memories of its published
# schedules (below) are in the ratios of these sizes cut so, and of no other published pair.
PAIRS = (
    ("Llama-2-13B", "Llama-33B"),
    ("Llama-33B", "Llama-2-13B"),
    ("Llama-33B", "Llama-65B"),
    ("Llama-65B", "Llama-33B"),
)
STAGES = {"Llama-2-13B": 4, "Llama-33B": 8, "Llama-65B": 16}
THRESHOLDS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6)
CONVERSATION = (5.02, 0.86)
"""Mean and deviation of the logarithm of response lengths: a conversation trace's. ASSUMED for HH-RLHF."""
PROMPT_TOKENS = 256
"""ASSUMED."""


def fusion() -> list[dict[str, Any]]:
    """RLHFuse's setting, off and on: 256 H100, 512 samples, mini-batches of 64, the mean of 20 batches."""
    print(
        f"{'actor':12} {'critic':12} {'cap':>5} {'gen s':>6} {'inf s':>6} {'x':>5} {'R_t':>5} {'loads x':>8} "
        f"{'R_t':>5} {'train s':>8} {'x':>5} {'updates x':>10} {'step x':>7} {'loads, pipelines x':>19}"
    )
    rows: list[dict[str, Any]] = []
    for actor, critic in PAIRS:
        models = [Role("actor", shape(actor), True, True), Role("critic", shape(critic), True)]
        trained = [Trained.of(role, STAGES[role.model.name], 256) for role in models]
        states = sum(role.bytes for role in models) / 256
        passes = [Role("reference", shape(actor), False), Role("reward", shape(critic), False), models[1]]
        for cap in (512, 1024, 2048):
            dice = np.random.default_rng(0)
            batches = [np.clip(dice.lognormal(*CONVERSATION, 512), 1, cap).round() for _ in range(20)]
            system = System(RLHFUSE, 256, models[0].model, passes, states, PROMPT_TOKENS, cap)
            row: dict[str, Any] = {"actor": actor, "critic": critic, "cap": cap}
            for name, loads in (("held", False), ("loaded", True)):
                row[name] = _swept(replace(system, loads=loads), batches)
            trains = train(RLHFUSE, trained, 64, round(PROMPT_TOKENS + float(np.mean(batches))))
            off, on = 8 * (trains.serial_s + trains.update_s), 8 * (trains.fused_s + trains.update_s)
            held, loaded = row["held"], row["loaded"]
            row |= {
                "serial_s": 8 * trains.serial_s, "fused_s": 8 * trains.fused_s, "update_s": 8 * trains.update_s,
                "step": (held["off_s"] + off) / (held["on_s"] + on),
                "step_loaded_pipelines": (loaded["off_s"] + 8 * trains.serial_s)
                / (loaded["on_s"] + 8 * trains.fused_s),
            }  # fmt: skip
            print(
                f"{actor:12} {critic:12} {cap:5} {held['generated_s']:6.2f} {held['off_s'] - held['generated_s']:6.2f} "
                f"{held['gain']:5.2f} {held['best']:5.0%} {loaded['gain']:8.2f} {loaded['best']:5.0%} {off:8.2f} "
                f"{trains.serial_s / trains.fused_s:5.2f} {off / on:10.2f} {row['step']:7.2f} "
                f"{row['step_loaded_pipelines']:19.2f}",
                flush=True,
            )
            rows.append(row)
    for name in ("held", "loaded"):
        print(f"\nspeed of generation and inference by R_t, weights {name}")
        print(f"{'actor':12} {'critic':12} {'cap':>5} " + " ".join(f"{r:>5.0%}" for r in THRESHOLDS))
        for row in rows:
            gains = " ".join(f"{gain:5.2f}" for gain in row[name]["gains"])
            print(f"{row['actor']:12} {row['critic']:12} {row['cap']:5} {gains}")
    return rows


def _swept(system: System, batches: Sequence[Array]) -> dict[str, Any]:
    """Generation and inference off, and on with each R_t."""
    tensor = best_tensor(system, batches[0])
    off = [in_turn(system, lengths, tensor) for lengths in batches]
    off_s = float(np.mean([r.end_s for r in off]))
    on_s = [float(np.mean([fused(system, lengths, tensor, r).end_s for lengths in batches])) for r in THRESHOLDS]
    return {
        "tensor": tensor, "generated_s": float(np.mean([r.generated_s for r in off])), "off_s": off_s,
        "on_s": min(on_s), "gain": off_s / min(on_s), "best": THRESHOLDS[on_s.index(min(on_s))],
        "gains": [round(off_s / s, 3) for s in on_s],
    }  # fmt: skip


def loop_fusion() -> list[dict[str, Any]]:
    """The real loop with replicas of one GPU and passes without pipelines; everything held; R_t swept."""
    scenario = Scenario(
        "13B ppo 64 H100", device("H100"), shape("Llama-2-13B"), 64, "ppo", Lognormal.of(300, 0.86),
        prompts_per_step=512, samples_per_prompt=1, max_response_length=2048, forward_gpus=1, steps=4,
        link_gb_s=50.0,
    )  # fmt: skip
    head()
    rows: list[dict[str, Any]] = []
    base = POLICIES["rlhfuse"]
    settings: list[tuple[str, Policy]] = [("off", SERVERFUL)]
    settings += [
        (f"R_t {100 * r:.0f} %", replace(base, cut="fixed" if r else "never", cut_fraction=r))
        for r in (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6)
    ]
    for label, setting in settings:
        rows.append(row(scenario, label, simulate(scenario, setting), rows))
        print(f"{scenario.name:24} {label:15} {rows[-1]['step_s']:8.2f} {rows[-1]['speed']:6.3f}", flush=True)
    return rows


def placement() -> list[dict[str, Any]]:
    print(
        f"{'model':12} {'GPUs':>5} {'stages':>7} {'best':10} {'step s':>8} {'colocate':>9} {'split':>8} "
        f"{'standalone':>11}"
    )
    rows: list[dict[str, Any]] = []
    for name in ("Llama-2-13B", "Llama-34B"):
        model = shape(name)
        roles = [Role("actor", model, True, True), Role("critic", model, True)]
        roles += [Role("reference", model, False), Role("reward", model, False)]
        pairs = [[roles[0], roles[2]], [roles[1], roles[3]]]
        for deepest in (None, 2):
            for gpus in (16, 32, 64, 96, 128):
                try:
                    best = map_models(roles, HYBRIDFLOW, gpus, Batch(), deepest)
                except ValueError as error:
                    print(f"{name:12} {gpus:5} {error}")
                    continue
                sets = ([roles], pairs, [[r] for r in roles])
                fixed = [fixed_mapping(s, HYBRIDFLOW, gpus, Batch(), deepest) for s in sets]
                times = [None if m is None else round(m.step_s, 1) for m in fixed]
                stages = "any" if deepest is None else f"<= {deepest}"
                print(
                    f"{name:12} {gpus:5} {stages:>7} {best.kind:10} {best.step_s:8.1f} {times[0]!s:>9} {times[1]!s:>8} "
                    f"{times[2]!s:>11}"
                )
                cut = best.parallelism["actor"]
                rows.append({
                    "model": name, "gpus": gpus, "max_pipeline": deepest, "best": best.kind,
                    "step_s": round(best.step_s, 2), "actor": [cut.pipeline, cut.tensor, cut.data],
                })  # fmt: skip
    return rows


# (pp0, pp1, m0, m1, f0, f1, mem0, mem1); greedy, annealed, bound and memory (annealed on it) of RLHFuse's authors.
PUBLISHED = {
    0: ((8, 4, 32, 16, 5, 4, 1.95, 2.0), 741, 708, 708, 19.7),
    2: ((8, 4, 8, 4, 5, 4, 1.95, 2.0), 239, 225, 225, 15.6),
    3: ((8, 8, 32, 32, 5, 2, 1.95, 1.0), 755, 702, 702, 20.5),
    5: ((8, 8, 8, 8, 5, 2, 1.95, 1.0), 225, 225, 225, 15.6),
    6: ((16, 8, 64, 32, 2, 2, 1.64, 2.0), 632, 618, 618, 39.72),
    8: ((16, 8, 16, 8, 2, 2, 1.64, 2.0), 214, 186, 186, 26.24),
    9: ((16, 16, 64, 64, 2, 1, 1.64, 1.0), 651, 613, 606, 38.72),
    10: ((16, 16, 32, 32, 2, 1, 1.64, 1.0), 363, 318, 318, 32.16),
}


# Others of the family: (pp0, pp1, m0, m1, f0, f1, mem0, mem1), and a memory little above 1F1B's.
FAMILY = {
    1: ((8, 4, 16, 8, 5, 4, 1.95, 2.0), 15.75),
    4: ((8, 8, 16, 16, 5, 2, 1.95, 1.0), 16.0),
    7: ((16, 8, 32, 16, 2, 2, 1.64, 2.0), 30.0),
    11: ((16, 16, 16, 16, 2, 1, 1.64, 1.0), 27.0),
}


def schedules() -> list[dict[str, Any]]:
    """Searched twice: with any memory, and with no more than the authors' schedule holds (of others: than given)."""
    print(
        f"{'case':>4} {'bound':>6} {'greedy':>7} {'theirs':>7} {'found':>6} {'memory':>7} {'CPU s':>6}   "
        f"{'found':>6} {'memory':>7} {'CPU s':>6} {'theirs':>7} {'memory':>7}"
    )
    rows: list[dict[str, Any]] = []
    others = {
        case: (numbers, 0, 0, Pipelines(*numbers).lower_bound(), memory) for case, (numbers, memory) in FAMILY.items()
    }
    for case, (numbers, their_greedy, their_makespan, bound, their_memory) in (PUBLISHED | others).items():
        pipelines = Pipelines(*numbers)
        row: dict[str, Any] = {"case": case, "greedy": greedy(pipelines).makespan}
        line = f"{case:4} {bound:6} {row['greedy']:7} {their_greedy:7}"
        for name, memory in (("free", math.inf), ("bounded", their_memory)):
            begin = time.process_time()
            found = search(pipelines, memory=memory)
            spent_s = time.process_time() - begin
            proven = "=" if found.makespan == found.bound else f">{found.bound}"
            line += f" {found.makespan:6}{proven} {found.peak_memory:7.2f} {spent_s:6.1f}"
            row |= {name: found.makespan, f"{name}_memory": round(found.peak_memory, 2), f"{name}_s": round(spent_s, 1)}
        print(f"{line} {their_makespan:7} {their_memory:7.2f}", flush=True)
        rows.append(row)
    return rows


def main() -> None:
    tables: dict[str, Callable[[], list[dict[str, Any]]]] = {
        f.__name__: f
        for f in (
            sceptic,
            testbed,
            level,
            tensor,
            bounds,
            assumed,
            rounds,
            cluster,
            fusion,
            loop_fusion,
            placement,
            schedules,
        )
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=tables)
    table = parser.parse_args().table
    print(json.dumps({"bench": f"reproduction {table}", "rows": tables[table]()}))


if __name__ == "__main__":
    main()
