"""How long the planner thinks: medians over steps of plan() and observe(), at 512 and 16,384 samples and 8 functions.

plain: every function with replicas of its own. job: training is streamed, and the tail may go on with more GPUs a
replica, which is all that a job can ask for. pool: functions share GPUs and may take turns on all of them, and gangs
are of any size (simulations only).

python bench/planner.py [--steps 15]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace

import numpy as np

from orchestrator.planner.adaptive import AdaptivePlanner
from orchestrator.planner.base import (
    TAIL,
    CallObservation,
    FunctionLimits,
    Prompt,
    StepObservation,
    StepPlan,
    StepRequest,
)
from orchestrator.planner.devices import device, shape
from orchestrator.planner.latency import forward_prior, generate_prior, train_prior
from orchestrator.planner.learned import Priors
from orchestrator.planner.policies import ADAPTIVE

FUNCTIONS = ("generate", "reward", "reference", "critic", "cost-critic", "train", "train-critic", "train-cost-critic")


def request(step: int, samples: int, n: int, replicas: int, mode: str, rng: np.random.Generator) -> StepRequest:
    prompts = samples // n
    head = tuple(range(64))  # a system prompt
    limits = {
        name: FunctionLimits(replicas, 98.0, gpus=1, max_batch=256, kv_tokens=400_000)
        if name in ("generate", "reward", "reference", "critic", "cost-critic")
        else FunctionLimits(replicas, 98.0, gpus=1, min_replicas=2)
        if mode == "pool"
        else FunctionLimits(1, 98.0 * 8, gpus=8)
        for name in FUNCTIONS
    }
    if mode != "plain":
        limits[TAIL] = FunctionLimits(replicas // 4, 98.0 * 4, gpus=4, max_batch=256, kv_tokens=3_000_000)
    first = (step % 3) * prompts  # an epoch is three steps
    return StepRequest(
        step,
        [Prompt(i, first + i, head + tuple(rng.integers(100, 50_000, 200).tolist()), "math") for i in range(prompts)],
        n,
        2048,
        limits,
        frozenset(FUNCTIONS[5:]) if mode != "plain" else frozenset(),
    )


def observation(asked: StepRequest, plan: StepPlan, rng: np.random.Generator) -> StepObservation:
    n = asked.samples_per_prompt
    lengths = {
        p.prompt_id: np.clip(rng.lognormal(5.0 + (p.prompt_id % 7) / 5, 0.5, n), 1, 2048).astype(int).tolist()
        for p in asked.prompts
    }
    calls = []
    for k, shard in enumerate(plan.shards):
        tokens = sum(lengths[asked.prompts[s // n].prompt_id][s % n] for s in shard)
        steps = max(lengths[asked.prompts[s // n].prompt_id][s % n] for s in shard)
        stats = {
            "prefill_tokens": 264.0 * len(shard) / n, "shared_tokens": 0.0, "decode_tokens": float(tokens),
            "decode_steps": float(steps), "prefill_s": 1e-4 * len(shard), "decode_s": 0.01 * steps + 2e-5 * tokens,
        }  # fmt: skip
        work_s = 0.1 + stats["prefill_s"] + stats["decode_s"]
        calls.append(
            CallObservation(
                "generate", f"g{k}", "generate", k == 0, 20.0, work_s, 264 * len(shard), tokens, len(shard), stats=stats
            )
        )
    for name in FUNCTIONS[1:]:
        counts = {"samples": 100.0, "tokens": 46_400.0}
        calls.append(CallObservation(name, name, "work", False, 0.1, 3.0, 264 * 100, 20_000, 100, stats=counts))
    return StepObservation(asked.step, 40.0, 3.0, lengths, calls)


def measure(samples: int, n: int, replicas: int, mode: str, steps: int) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    gpu, model = device("H100"), shape("Qwen2.5-7B")
    work = {name: forward_prior(gpu, model, call_s=0.1) for name in FUNCTIONS[1:5]}
    work |= {name: train_prior(gpu, model, 1 if mode == "pool" else 8, call_s=1.0) for name in FUNCTIONS[5:]}
    starts = dict.fromkeys((*FUNCTIONS, TAIL), 20.0)
    tail = generate_prior(gpu, model, 4, call_s=0.1) if mode != "plain" else None
    priors = Priors(generate_prior(gpu, model, call_s=0.1), work, starts, tail=tail)
    held = replace(priors, start_s=dict.fromkeys(starts, 0.0), tail=None) if mode == "pool" else None
    planner = AdaptivePlanner(
        ADAPTIVE, priors=priors, pool_gpus=replicas if mode == "pool" else None, gangs=FUNCTIONS[5:], turns=held
    )
    plan_ms, observe_ms = [], []
    for step in range(steps):
        asked = request(step, samples, n, replicas, mode, rng)
        start = time.process_time()
        plan = planner.plan(asked)
        plan_ms.append(1e3 * (time.process_time() - start))
        seen = observation(asked, plan, rng)
        start = time.process_time()
        planner.observe(seen)
        observe_ms.append(1e3 * (time.process_time() - start))
    return statistics.median(plan_ms), statistics.median(observe_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15)
    steps = parser.parse_args().steps
    result = {}
    print(
        f"{'samples':>8} {'replicas':>9} {'':>5} {'plan ms':>9} {'observe ms':>11} {'limit ms':>9}   "
        "(CPU time, medians)"
    )
    for samples, replicas, limit_ms in ((512, 16, 50), (512, 160, 50), (16_384, 160, 300)):
        for mode in ("plain", "job", "pool"):
            plan_ms, observe_ms = measure(samples, 8, replicas, mode, steps)
            print(f"{samples:>8} {replicas:>9} {mode:>5} {plan_ms:>9.2f} {observe_ms:>11.2f} {limit_ms:>9}")
            key = f"{samples}x{replicas}-{mode}"
            result[key] = {"plan_ms": round(plan_ms, 3), "observe_ms": round(observe_ms, 3)}
    print(json.dumps({"bench": "planner", "functions": len(FUNCTIONS), **result}))


if __name__ == "__main__":
    main()
