"""This runtime against TRL 1.16's GRPOTrainer: time of a step, and what is learned from equal samples.

    python bench/against_trl.py [--peer-python PYTHON] [--work DIR] [--rounds 2] [--steps 6] [--parts step learning]

Time of a step. The model of bench/planted.py (Qwen2 architecture, 4 layers of 256), 8 prompts of 64 tokens a step,
n = 8, responses of at most 64 tokens, fp32, one thread a process, in rounds of

    trl    GRPOTrainer: one process, transformers' `generate`
    warm   a job with planner.keep_warm = true: every function holds its replica for the whole job
    zero   the same job without: each function is forked when its stage begins, and gone when it ends

for two workloads: `full`, no response ends before the limit, and `varying`, lengths lognormal with sigma 0.86. The
lengths come out of the model itself: after each token it gives the end of sequence the probability that the wanted
distribution has there (planted.py says how). Both systems sample from the same weights and end responses as they always
do; nothing is patched in either, and the table shows the mean length that each has drawn.

A step is what lies between two lines of metrics, wall and CPU time of all of a system's processes; warm-up steps are
left out. A job's step holds more than TRL's: weights and optimizer state are stored and committed at each, and TRL
saves nothing. With one thread a process TRL has one core; a job's reward function and orchestrator may use a second
while the sampler works (`--core 0` pins either system to one core). Ratios are taken within a round and their median is
reported; on a machine that does other work as well, the ratio of CPU times is the one to trust.

Learning. The arithmetic example's model, prompts in the file's order and reward, `--learning-steps` steps of 16 prompts
with n = 8, five seeds each. On-policy, the loss of GRPO is zero by construction (advantages of a group add up to none),
so gradient norms are compared beside it. Two means agree when they differ by less than Student's t at 99 % allows.

Results of the parts are kept in --work, and a run with the same --work goes on where the last one ended.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.jobs import ENV, JobFigures, run_job  # noqa: E402

PEER = ("trl==1.16.0", "torch==2.13.0", "transformers==5.23.0")
SYSTEMS = ("trl", "warm", "zero")
WORKLOADS = ("full", "varying")
TARGETS = {("full", "warm"): 0.7, ("varying", "warm"): 0.5, ("full", "zero"): 1.0, ("varying", "zero"): 1.0}
PROMPTS, N, LIMIT = 8, 8, 64
T_99 = {3: 4.60, 4: 3.71, 5: 3.36, 6: 3.17, 8: 2.98, 10: 2.88}
"""Student's t, two-sided 99 %, for 2 seeds - 2 degrees of freedom."""

Steps = list[dict[str, float]]

JOB = """\
name = "bench"
recipe = "grpo"
steps = {steps}
seed = {seed}
[model]
path = "{model}"
[data]
train = "{data}"
shuffle = false
prompts_per_step = {prompts_per_step}
[rollout]
n = {n}
max_response_length = {max_response_length}
slots = 128
[reward]
score = "{reward}"
[validation]
every = 0
[train]
lr = {lr}
[algorithm.advantage_options]
epsilon = 1e-4  # TRL's
"""


@dataclass(frozen=True)
class Bench:
    """Where parts are kept, and what every part is run with."""

    work: Path
    python: Path
    core: int | None
    timeout_s: float

    def part(self, name: str, settings: Mapping[str, Any], make: Callable[[], Any]) -> Any:
        """What `make` returned for these settings, now or in an earlier run."""
        key = hashlib.sha256(json.dumps([name, settings, self.core], sort_keys=True).encode()).hexdigest()[:10]
        file = self.work / f"{name}.{key}.json"
        if not file.exists():
            print(f"running {name}", file=sys.stderr, flush=True)
            value = make()
            file.write_text(json.dumps(value))
        return json.loads(file.read_text())

    def trl(self, task: Mapping[str, Any], seeds: Sequence[int]) -> dict[str, Steps]:
        with tempfile.TemporaryDirectory(dir=self.work) as folder:
            source, target = Path(folder) / "task.json", Path(folder) / "out.json"
            source.write_text(json.dumps({**task, "seeds": list(seeds), "threads": 1}))
            command = [str(self.python), str(ROOT / "bench" / "against_trl_peer.py"), str(source), str(target)]
            core = self.core
            done = subprocess.run(
                command, env=os.environ | ENV, cwd=folder, capture_output=True, text=True, check=False,
                timeout=self.timeout_s * len(seeds),
                preexec_fn=None if core is None else lambda: os.sched_setaffinity(0, {core}),
            )  # fmt: skip
            if done.returncode:
                raise SystemExit(f"{' '.join(command)}: {done.stderr[-2000:]}")
            result: dict[str, Steps] = json.loads(target.read_text())
            return result

    def ours(self, task: Mapping[str, Any], seed: int, *, warm: bool) -> Steps:
        with tempfile.TemporaryDirectory(dir=self.work) as folder:
            job = Path(folder) / "job.toml"
            job.write_text(JOB.format(**task, seed=seed))
            figures = run_job(
                job, Path(folder) / "run", [f"planner.keep_warm={str(warm).lower()}"],
                timeout_s=self.timeout_s, core=self.core,
            )  # fmt: skip
            return job_steps(figures)


def job_steps(figures: JobFigures) -> Steps:
    """A job's steps in the peer's terms, and CPU time by function. `reward_s` overlaps `gen_s`."""
    return [
        {
            "wall_s": step.wall_s,
            "cpu_s": step.cpu_s,
            "gen_s": step.metrics["timing_s/gen"],
            "reward_s": step.metrics["timing_s/reward"],
            "train_s": step.metrics["timing_s/update_actor"],
            "length": step.metrics["response_length/mean"],
            "reward": step.metrics["critic/score/mean"],
            "loss": step.metrics["actor/pg_loss"],
            "grad_norm": step.metrics["actor/grad_norm"],
        }
        | {f"cpu_{name}_s": cpu_s for name, cpu_s in step.functions_cpu_s.items()}
        for step in figures.steps
    ]


def peer_python(home: Path) -> Path:
    """The interpreter of an environment with TRL, built on first use."""
    if not (home / "complete").exists():
        print(f"building {home}", file=sys.stderr)
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([home / "bin" / "python", "-m", "pip", "install", "--quiet", *PEER], check=True)
        (home / "complete").touch()
    return home / "bin" / "python"


# --- the time of a step ----------------------------------------------------------------------------------------------


def measure_steps(bench: Bench, rounds: int, steps: int, warm_up: int) -> dict[str, Any]:
    """{workload: {system: figures}}, printed as a table."""
    count = steps + warm_up
    found: dict[tuple[str, str], list[dict[str, float]]] = {(w, s): [] for w in WORKLOADS for s in SYSTEMS}
    for number in range(rounds):
        for workload in WORKLOADS:
            folder = bench.work / workload
            if not (folder / "reward.py").exists():
                make = {"limit": LIMIT, "lengths": workload, "prompts": 256, "prompt_length": 64}
                code = (
                    f"import sys, pathlib; from bench import planted; planted.make(pathlib.Path(sys.argv[1]), **{make})"
                )
                subprocess.run([sys.executable, "-c", code, folder], env=os.environ | ENV, cwd=ROOT, check=True)
            task = {
                "model": str(folder / "model"), "data": str(folder / "train.jsonl"),
                "reward": f"{folder / 'reward.py'}:score", "n": N, "prompts_per_step": PROMPTS,
                "max_response_length": LIMIT, "steps": count, "lr": 1e-6,
            }  # fmt: skip
            for system in SYSTEMS if number % 2 == 0 else SYSTEMS[::-1]:
                part = f"{workload}-{system}-{number}"
                run = one_run(bench, task, system, number)
                rows = bench.part(part, {"steps": count}, run)[-steps:]
                figures = {key: statistics.fmean(row.get(key, 0.0) for row in rows) for key in rows[0]}
                found[workload, system].append(figures | {"wall_s": statistics.median(row["wall_s"] for row in rows)})
    head = ("wall s", "cpu s", "gen", "reward", "train", "length")
    print(f"{'a step':<16}" + "".join(f"{h:>9}" for h in head) + f"{'wall ratio':>18}{'cpu ratio':>18}  target")
    result: dict[str, Any] = {}
    for workload in WORKLOADS:
        result[workload] = {}
        for system in SYSTEMS:
            mine, trl = found[workload, system], found[workload, "trl"]
            row = {key: statistics.median(run.get(key, 0.0) for run in mine) for key in mine[0]}
            entry: dict[str, Any] = {k: round(v, 4) for k, v in row.items() if k not in ("reward", "loss", "grad_norm")}
            line = f"{workload + ' ' + system:<16}" + "".join(
                f"{row[k]:>9.3f}" for k in ("wall_s", "cpu_s", "gen_s", "reward_s", "train_s", "length")
            )
            if system != "trl":
                for kind in ("wall", "cpu"):
                    ratios = sorted(a[f"{kind}_s"] / b[f"{kind}_s"] for a, b in zip(mine, trl, strict=True))
                    entry[f"{kind}_ratio"] = round(statistics.median(ratios), 3)
                    line += f"{statistics.median(ratios):>7.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
                entry["target"] = TARGETS[workload, system]
                entry["reached"] = entry["wall_ratio"] <= entry["target"]
                entry["reached_in_cpu"] = entry["cpu_ratio"] <= entry["target"]
                line += f"  {entry['target']} {'reached' if entry['reached'] else 'MISSED'}"
                line += "" if entry["reached"] == entry["reached_in_cpu"] else " (by cpu the other way)"
            result[workload][system] = entry
            print(line)
    for workload, systems in result.items():
        split = {k[4:-2]: v for k, v in systems["warm"].items() if re.fullmatch("cpu_.+_s", k)}
        print(f"{workload} warm, cpu s: " + ", ".join(f"{name} {cpu_s:.2f}" for name, cpu_s in split.items()))
    return result


def one_run(bench: Bench, task: Mapping[str, Any], system: str, seed: int) -> Callable[[], Steps]:
    if system == "trl":
        return lambda: bench.trl(task, [seed])[str(seed)]
    return lambda: bench.ours(task, seed, warm=system == "warm")


# --- learning --------------------------------------------------------------------------------------------------------


def measure_learning(bench: Bench, steps: int, seeds: int) -> dict[str, Any]:
    example = ROOT / "examples" / "arithmetic"
    task = {
        "model": str(example / "model"), "data": str(example / "train.jsonl"),
        "reward": f"{example / 'reward.py'}:compute_score", "n": 8, "prompts_per_step": 16,
        "max_response_length": 20, "steps": steps, "lr": 5e-4,
    }  # fmt: skip
    settings = {"steps": steps, "prompts": task["prompts_per_step"], "lr": task["lr"]}
    curves: dict[str, list[Steps]] = {"trl": [], "ours": []}
    for seed in range(seeds):
        curves["trl"].append(bench.part(f"learning-trl-{seed}", settings, one_run(bench, task, "trl", seed)))
        curves["ours"].append(bench.part(f"learning-ours-{seed}", settings, one_run(bench, task, "warm", seed)))
    print(f"\nlearning, {seeds} seeds: mean and standard deviation")
    print(f"{'step':>5}" + "".join(f"{s + ' ' + k:>24}" for k in ("reward", "grad_norm", "loss") for s in curves))
    for at in sorted({1, *range(4, steps + 1, 4), steps}):
        line = f"{at:>5}"
        for key in ("reward", "grad_norm", "loss"):
            for runs in curves.values():
                mean, deviation = spread([run[at - 1][key] for run in runs])
                line += f"{f'{mean:.1e}' if key == 'loss' else f'{mean:.3f}':>14} ± {deviation:<7.1g}"
        print(line)
    quarter = max(1, steps // 4)
    sections = {
        "reward, all steps": ("reward", slice(None)),
        "reward, last quarter": ("reward", slice(-quarter, None)),
        "grad_norm, all steps": ("grad_norm", slice(None)),
        "length, all steps": ("length", slice(None)),
    }
    result: dict[str, Any] = {}
    for name, (key, part) in sections.items():
        means = {
            system: [statistics.fmean(step[key] for step in run[part]) for run in runs]
            for system, runs in curves.items()
        }
        result[name] = agreement(means["trl"], means["ours"])
        print(f"{name:<24}" + ", ".join(f"{k} {v}" for k, v in result[name].items()))
    largest = {s: max(abs(step["loss"]) for run in runs for step in run) for s, runs in curves.items()}
    result["largest |loss|"] = largest
    result["curves"] = {
        system: {
            key: [[round(x, 5) for x in spread([run[at][key] for run in runs])] for at in range(steps)]
            for key in ("reward", "grad_norm", "loss")
        }
        for system, runs in curves.items()
    }
    print(f"{'largest |loss|':<24}" + ", ".join(f"{k} {v:.1e}" for k, v in largest.items()))
    return result


def spread(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def agreement(trl: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """Means over seeds, and t = difference / sqrt(s1^2 / n + s2^2 / n)."""
    (a, s_a), (b, s_b) = spread(trl), spread(ours)
    error = ((s_a**2 + s_b**2) / len(trl)) ** 0.5
    t = abs(a - b) / error if error else 0.0
    limit = T_99.get(len(trl), 3.5)
    return {
        "trl": f"{a:.4f} ± {s_a:.4f}", "ours": f"{b:.4f} ± {s_b:.4f}", "t": round(t, 2), "t_99": limit,
        "agrees": t < limit,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", type=Path, help="interpreter of an environment with TRL 1.16 (or one is made)")
    parser.add_argument(
        "--peer-home", type=Path, default=Path.home() / ".cache" / "rlhf-orchestrate" / "peers" / "trl-1.16.0",
        help="where that one is made",
    )  # fmt: skip
    parser.add_argument("--work", type=Path, help="keeps the parts' results (default: a temporary directory)")
    parser.add_argument("--parts", nargs="+", choices=("step", "learning"), default=["step", "learning"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="steps of a run that count")
    parser.add_argument("--warm-up", type=int, default=2, help="steps of a run before those")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--learning-steps", type=int, default=24)
    parser.add_argument("--core", type=int, help="pin each system to this core")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of one run")
    given = parser.parse_args()
    python = given.peer_python or peer_python(given.peer_home)
    work = Path(tempfile.mkdtemp(prefix="against-trl-")) if given.work is None else given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    bench = Bench(work, python.absolute(), given.core, given.timeout_s)
    result: dict[str, Any] = {"bench": "against_trl", "load": os.getloadavg()[0], "rounds": given.rounds}
    try:
        if "step" in given.parts:
            result["step"] = measure_steps(bench, given.rounds, given.steps, given.warm_up)
        if "learning" in given.parts:
            result["learning"] = measure_learning(bench, given.learning_steps, given.seeds)
    finally:
        if given.work is None:
            shutil.rmtree(work, ignore_errors=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
