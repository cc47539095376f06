"""What a run would have cost on machines that are held from its beginning to its end: its steps, simulated.

    dedicated    each function has machines of its own: all replicas that the job gives it
    colocated    all functions take turns on one set of machines, as verl places them by default: as many GPUs as the
                 function with the most has, at the dearest one's price a GPU; what needs no GPU runs on their CPUs

Both do the run's own work: its prompts and lengths, in the times that its calls were measured to take, stage after
stage; nothing starts but once, and moving weights between functions is free. Validations take what their calls took.
The run's own spending is that of the same steps, with all starts, retries and step 0. Kept in `reserved.json`.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from functions.base.wire import Json
from orchestrator.base.errors import RunError
from orchestrator.base.files import write_atomically
from orchestrator.run.directory import RunDirectory
from orchestrator.run.ledger import Cost, read_books, together, total
from orchestrator.simulation.baselines import SERVERFUL
from orchestrator.simulation.job import simulate
from orchestrator.simulation.replay import Recorded, replay
from orchestrator.telemetry.trace import JOB, read_spans

FILE = "reserved.json"
FORMAT = 1
STEPS = 100
"""Of a longer run, its first so many."""


@dataclass(frozen=True)
class Held:
    """Machines that are held for `wall_s`; `machines` in words."""

    machines: str
    wall_s: float
    replica_s: float
    gpu_s: float
    usd: float


def reserved(run: RunDirectory) -> Json:
    """{"format", "steps", "used", "dedicated", "colocated"}, or {"format", "steps", "why"} of one that has no replay.

    Takes CPU time: about 0.1 s a step of 256 samples.
    """
    books = read_books(run.path / "cost.json")
    try:
        scenario = replay(run)
        count = min(scenario.steps, STEPS)
        if books is None or len(books.steps) <= count:
            raise RunError(f"{run.path / 'cost.json'}: has no closed books of step {count}")
    except RunError as error:
        return {"format": FORMAT, "steps": 0, "why": str(error)}
    scenario, validated_s = replace(scenario, steps=count), validations_s(run.path / "trace.json", count)
    used = together(books.steps[: count + 1])
    spent = total(used.functions)
    return {
        "format": FORMAT,
        "steps": count,
        "used": {"wall_s": used.wall_s, "replica_s": spent.replica_s, "gpu_s": spent.gpu_s, "usd": spent.usd},
        "dedicated": asdict(dedicated(scenario, validated_s)),
        "colocated": asdict(colocated(scenario, validated_s)),
    }


def dedicated(scenario: Recorded, more_s: float) -> Held:
    """`more_s`: seconds beside the simulated steps, for which the machines are held too."""
    wall_s = more_s + simulate(scenario, replace(SERVERFUL, colocated=False)).plans[-1].stop_s
    held = [
        Cost(f.max_replicas * wall_s, 0.0, f.max_replicas * f.gpus * wall_s,
             f.max_replicas * wall_s / 3600 * f.usd_per_hour, f.max_replicas)
        for f in scenario.functions
    ]  # fmt: skip
    whole = sum(held, Cost())
    words = ", ".join(f"{f.max_replicas} of {f.name}" for f in scenario.functions)
    return Held(words, wall_s, whole.replica_s, whole.gpu_s, whole.usd)


def colocated(scenario: Recorded, more_s: float) -> Held:
    """As `dedicated`."""
    on_gpus = [f for f in scenario.functions if f.gpus] or list(scenario.functions)
    pool = max(f.max_replicas * max(1, f.gpus) for f in on_gpus)
    wall_s = more_s + simulate(replace(scenario, gpus=pool), SERVERFUL).plans[-1].stop_s
    price = max(f.usd_per_hour / max(1, f.gpus) for f in on_gpus)
    gpus = pool if on_gpus[0].gpus else 0
    words = f"{pool} {'GPU' if gpus else 'machine'}{'s' * (pool != 1)} that all functions share"
    return Held(words, wall_s, pool * wall_s, gpus * wall_s, pool * wall_s / 3600 * price)


def validations_s(trace: Path, steps: int) -> float:
    """Seconds in which calls of validations up to step `steps` were at work, starts left out."""
    windows, calls = list[tuple[float, float]](), list[tuple[float, float]]()
    for process, lane, event in read_spans(trace):
        span = (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        if process != JOB and event["name"] != "replica":
            calls.append(span)
        elif (process, lane) == (JOB, "testing") and int(event["name"].removeprefix("step ")) <= steps:
            windows.append(span)
    inside = sorted(call for call in calls if any(a <= call[0] <= b for a, b in windows))
    covered_s, end_s = 0.0, 0.0
    for start_s, stop_s in inside:
        covered_s += max(0.0, stop_s - max(start_s, end_s))
        end_s = max(end_s, stop_s)
    return covered_s


def update_reserved(run: RunDirectory, *, write: bool = True) -> Json:
    """`reserved` as it is kept, made anew where the run has more steps than it was made of. Raises RunError."""
    path, books = run.path / FILE, read_books(run.path / "cost.json")
    done = 0 if books is None else len(books.steps) - 1
    try:
        known: Json = json.loads(path.read_text())
        if known["format"] == FORMAT and known["of"] == done:
            return known
    except (OSError, ValueError, KeyError):
        pass  # none, or another version's
    found = reserved(run) | {"of": done}
    if write:
        write_atomically(path, json.dumps(found).encode() + b"\n")
    return found
