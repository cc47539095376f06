"""What the orchestrator itself takes of a step of 512 samples, and its memory: a real job on the local platform.

    python bench/orchestrator_time.py [--steps 4] [--profile]

64 prompts of 64 tokens, n = 8, responses of at most 64 tokens with lognormal lengths (bench/planted.py), one replica of
each function with one thread; functions warm, then going to zero. The model has 3.5 M parameters and a step takes
seconds: with any larger one the shares below are smaller.

    cpu        CPU seconds a step of the orchestrator's process (planning, HTTP, exchange, journal, telemetry, the view)
    of wall    the same as a share of the step's wall time (target: under 2 %)
    of cpu     as a share of the CPU time of all of the job's processes: what it is where nobody waits for a core
    uncovered  wall time of a step in which no function works on a call: planning, requests on their way, the commit,
               and with functions at zero their starts
    peak       resident memory of the process at its highest (target: under 200 MB); it must import no torch

--profile runs one more job under cProfile and prints own CPU time by module; the main thread only, and slower.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.jobs import ENV, JobFigures, covered_s, run_job  # noqa: E402

HEAVY = ("torch", "transformers", "vllm", "numba", "scipy", "pandas")
JOB = """\
name = "bench"
recipe = "grpo"
steps = {steps}
[model]
path = "model"
[data]
train = "train.jsonl"
prompts_per_step = 64
[rollout]
n = 8
max_response_length = 64
slots = 128
[reward]
score = "reward.py:score"
[validation]
every = 0
"""


def inside(report: Path, profile: bool, arguments: list[str]) -> int:
    """The command line, and then what is loaded in its process."""
    from orchestrator.commands.main import main as command

    profiler = cProfile.Profile(time.thread_time)
    code = profiler.runcall(command, arguments) if profile else command(arguments)
    if profile:
        profiler.dump_stats(report.with_suffix(".prof"))
    report.write_text(json.dumps([name for name in HEAVY if name in sys.modules]))
    return code


def figures_of(job: JobFigures, warm_up: int) -> dict[str, float]:
    steps = [step for step in job.steps if step.step > warm_up]
    whole = {int(s["name"].split()[1]): s for s in job.spans if s["lane"] == "step"}
    calls = [(s["start_s"], s["stop_s"]) for s in job.spans if s["group"] != "job" and s["name"] != "replica"]
    uncovered = []
    for step in steps:
        start_s, stop_s = whole[step.step - 1]["stop_s"], whole[step.step]["stop_s"]
        uncovered.append(stop_s - start_s - covered_s(calls, start_s, stop_s))
    wall_s, cpu_s, own_s = (
        statistics.fmean(getattr(step, name) for step in steps) for name in ("wall_s", "cpu_s", "orchestrator_cpu_s")
    )
    return {
        "step_s": wall_s,
        "step_cpu_s": cpu_s,
        "orchestrator_cpu_s": own_s,
        "share_of_wall": own_s / wall_s,
        "share_of_cpu": own_s / cpu_s,
        "uncovered_s": statistics.median(uncovered),
        "uncovered_share": statistics.median(uncovered) / statistics.median(step.wall_s for step in steps),
        "peak_rss_mb": job.peak_rss_mb,
        "calls": len(calls) / len(whole),
    }


def print_profile(file: Path) -> dict[str, float]:
    """Own seconds by module, the ten greatest."""
    seconds: dict[str, float] = {}
    stats: Any = pstats.Stats(str(file))
    for (path, _, name), (_, _, own_s, _, _) in stats.stats.items():
        parts = Path(path).with_suffix("").parts
        module = name if path == "~" else "/".join(parts[-2:])
        seconds[module] = seconds.get(module, 0.0) + own_s
    found = dict(sorted(seconds.items(), key=lambda item: -item[1])[:10])
    for module, own_s in found.items():
        print(f"{own_s:9.3f} s  {module}")
    return {module: round(own_s, 3) for module, own_s in found.items()}


def main() -> int:
    if "--inside" in sys.argv:
        at = sys.argv.index("--inside")
        return inside(Path(sys.argv[at + 1]), sys.argv[at + 2] == "profile", sys.argv[at + 3 :])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="steps of a run that count")
    parser.add_argument("--warm-up", type=int, default=1, help="steps of a run before those")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of one run")
    given = parser.parse_args()
    result: dict[str, Any] = {"bench": "orchestrator_time", "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        make = "limit=64, lengths='varying', prompts=512, prompt_length=64"
        code = f"import sys, pathlib; from bench.planted import make; make(pathlib.Path(sys.argv[1]), {make})"
        subprocess.run([sys.executable, "-c", code, directory], env=os.environ | ENV, cwd=ROOT, check=True)
        (folder / "job.toml").write_text(JOB.format(steps=given.steps + given.warm_up))
        head = ("step s", "step cpu s", "cpu s", "of wall", "of cpu", "uncovered s", "of wall", "peak MB", "calls")
        print(f"{'':<8}" + "".join(f"{h:>12}" for h in head))
        for name, warm in (("warm", True), ("zero", False)):
            report = folder / f"{name}.json"
            program = (str(Path(__file__).resolve()), "--inside", str(report), "plain")
            job = run_job(
                folder / "job.toml", folder / name, [f"planner.keep_warm={str(warm).lower()}"],
                timeout_s=given.timeout_s, program=program,
            )  # fmt: skip
            row = figures_of(job, given.warm_up)
            heavy = json.loads(report.read_text())
            result[name] = {key: round(value, 5) for key, value in row.items()} | {"heavy_modules": heavy}
            shown = "".join(f"{v:>12.2%}" if "share" in k else f"{v:>12.3f}" for k, v in row.items())
            print(f"{name:<8}{shown}")
            if heavy:
                print(f"{name}: the orchestrator has imported {', '.join(heavy)}")
        if given.profile:
            report = folder / "profile.json"
            program = (str(Path(__file__).resolve()), "--inside", str(report), "profile")
            run_job(folder / "job.toml", folder / "profile", [], timeout_s=given.timeout_s, program=program)
            result["profile"] = print_profile(report.with_suffix(".prof"))
    runs = (result["warm"], result["zero"])
    result["reached"] = {
        "under 2 % of the step": all(run["share_of_wall"] < 0.02 for run in runs),
        "under 200 MB": all(run["peak_rss_mb"] < 200 for run in runs),
        "no torch": not any(run["heavy_modules"] for run in runs),
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
