"""Is what the planner says true? The real arithmetic job on the local platform, with replicas held for the whole job
(`held`: policy static, keep_warm) and under `adaptive`.

python bench/planner_truth.py [--repeats 3] [--steps 8] [--job JOB.toml] [key.path=value ...]

The job is the example's, with 128 samples a prompt, so that a step is longer than what a process takes to start (about
0.1 s), and with a learning rate so small that both sample the same tokens to the last step: `adaptive` adds up its
gradients in another order. `rollout.n=8 train.lr=5e-4` is the example as it stands.

The two policies take turns within one run, in an order that alternates, so that a machine busy with other things is so
for both; what counts are ratios of neighbouring runs. Of each run:
    job s         from the orchestrator's start to its end, the first start of everything included
    step s        median over the steps after the fifth
    replica s     what all replicas were paid for, start to end (cost.json)
    CPU s         of all processes
    error         |predicted - measured| / measured of the step's time, median after the fifth step
    same          whether all samples of all steps are those of the first run, token for token
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.jobs import ENV, ROOT

POLICIES = {
    "held": ["planner.policy=static", "planner.keep_warm=true"],
    "adaptive": ["planner.policy=adaptive", "planner.objective=speed"],
}
"""Speed: hardly any time may be given for replica-seconds here; the knee would give some."""
SETTINGS = ("rollout.n=128", "train.lr=1e-8", "validation.every=0", "telemetry.samples=100000")
WARM_UP = 5
"""Steps that the planner may learn from before it is judged."""


@dataclass(frozen=True)
class Measured:
    policy: str
    job_s: float
    step_s: float
    replica_s: float
    cpu_s: float
    errors: Sequence[float]
    samples: str
    """A digest of all of them."""


def cpu_s() -> float:
    """Of all descendants that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(
    job: Path,
    run: Path,
    policy: str,
    overrides: Sequence[str],
    program: Sequence[str] = ("-m", "orchestrator.commands"),
) -> Measured:
    before_s = cpu_s()
    command = [sys.executable, *program, "run", str(job), "--run-dir", str(run)]
    command += [*POLICIES[policy], "telemetry.tensorboard=false", *SETTINGS, *overrides]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | ENV, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr[-2000:] or done.stdout[-2000:]}")
    books = json.loads((run / "cost.json").read_text())
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    judged = [m for m in metrics if m["step"] > WARM_UP]
    if not judged:
        raise SystemExit(f"--steps: wants more than {WARM_UP}: the planner is judged after it has learned")
    digest = hashlib.sha256()
    for file in sorted((run / "samples").iterdir()):
        digest.update(file.read_bytes())
    return Measured(
        policy=policy,
        job_s=books["wall_s"],
        step_s=statistics.median(m["planner/step_s"] for m in judged),
        replica_s=sum(f["replica_s"] for f in books["functions"].values()),
        cpu_s=cpu_s() - before_s,
        errors=[m["planner/error/step"] for m in judged],
        samples=digest.hexdigest()[:12],
    )


def ratio(pairs: Sequence[tuple[Measured, Measured]], name: str) -> float:
    """Median over the repeats of adaptive to held."""
    ratios: list[float] = [getattr(adaptive, name) / getattr(held, name) for held, adaptive in pairs]
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--job", type=Path, default=ROOT / "examples" / "arithmetic" / "job.toml")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    given = parser.parse_args()
    print(f"{'policy':<10} {'job s':>7} {'step s':>7} {'replica s':>10} {'CPU s':>7} {'error':>7}  same")
    pairs: list[tuple[Measured, Measured]] = []
    first = ""
    with tempfile.TemporaryDirectory() as directory:
        for repeat in range(given.repeats):
            found: dict[str, Measured] = {}
            for policy in [*POLICIES] if repeat % 2 == 0 else [*POLICIES][::-1]:
                run = Path(directory) / f"{policy}-{repeat}"
                m = found[policy] = measure(given.job, run, policy, [f"steps={given.steps}", *given.overrides])
                first = first or m.samples
                print(
                    f"{policy:<10} {m.job_s:>7.2f} {m.step_s:>7.3f} {m.replica_s:>10.2f} {m.cpu_s:>7.2f} "
                    f"{100 * statistics.median(m.errors):>6.1f}%  {'yes' if m.samples == first else 'NO'}",
                    flush=True,
                )
            pairs.append((found["held"], found["adaptive"]))
    runs = [m for pair in pairs for m in pair]
    result = {
        "repeats": given.repeats,
        "steps": given.steps,
        "same_samples": all(m.samples == first for m in runs),
        "replica_s_ratio": round(ratio(pairs, "replica_s"), 4),
        "job_s_ratio": round(ratio(pairs, "job_s"), 4),
        "step_s_ratio": round(ratio(pairs, "step_s"), 4),
        "cpu_s_ratio": round(ratio(pairs, "cpu_s"), 4),
        "step_error": {
            policy: round(statistics.median(e for m in runs if m.policy == policy for e in m.errors), 4)
            for policy in POLICIES
        },
    }
    print(
        f"\nadaptive / held, median of {given.repeats}: replica seconds {result['replica_s_ratio']} (wants <= 0.70), "
    )
    print(
        f"    job {result['job_s_ratio']} and step {result['step_s_ratio']} (want <= 1.05), CPU {result['cpu_s_ratio']}"
    )
    print(f"median step error after {WARM_UP} steps: {result['step_error']} (wants < 0.15)")
    print(json.dumps({"bench": "planner_truth", **result}))


if __name__ == "__main__":
    main()
