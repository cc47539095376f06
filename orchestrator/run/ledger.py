"""The books: replica-seconds and dollars per function, step and job.

A replica is paid for from start to end, busy or not (platforms/base.py, `Usage`). A step's cost is what the books rose
by between its commit and the one before, so steps add up to the job, starts, retries and idle time included. Every
execution of a job (each `resume`) goes on with the books of the ones before: what a killed execution spent on the step
that it did not commit is part of that step.

cost.json
    usd, wall_s             of the whole job until now
    functions               {name: replica_s, busy_s, gpu_s, usd, starts, parked_s}
    steps                   [{step, wall_s, usd, functions}], committed ones
    open                    the same for the step that is not committed yet
    executions              how many times the job was started or resumed
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from functions.base.wire import Json
from orchestrator.base.errors import RunError
from orchestrator.base.files import write_atomically
from orchestrator.platforms.base import FunctionSpec, Usage

FORMAT = 1


@dataclass(frozen=True)
class Cost:
    """What one function cost over some time."""

    replica_s: float = 0.0
    busy_s: float = 0.0
    gpu_s: float = 0.0
    usd: float = 0.0
    starts: int = 0
    """Replicas started: each was a cold start."""
    parked_s: float = 0.0
    """Of their processes between two replicas: host memory, no accelerator; no part of replica_s."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.replica_s + other.replica_s,
            self.busy_s + other.busy_s,
            self.gpu_s + other.gpu_s,
            self.usd + other.usd,
            self.starts + other.starts,
            self.parked_s + other.parked_s,
        )

    def __sub__(self, other: Cost) -> Cost:
        return self + Cost(-other.replica_s, -other.busy_s, -other.gpu_s, -other.usd, -other.starts, -other.parked_s)


Costs = Mapping[str, Cost]
"""By function name."""


def costs_of(usage: Iterable[Usage], specs: Iterable[FunctionSpec], now_s: float) -> dict[str, Cost]:
    """What each function has cost by `now_s`: sum over its replicas of (stopped_s or now_s) - started_s."""
    by_name = {spec.name: spec for spec in specs}
    costs = dict.fromkeys(by_name, Cost())
    for life in usage:
        spec = by_name[life.function]
        replica_s = max(0.0, (now_s if life.stopped_s is None else life.stopped_s) - life.started_s)
        usd = replica_s / 3600 * spec.usd_per_hour
        busy_s, gpu_s = min(life.busy_s, replica_s), replica_s * spec.gpus
        costs[life.function] += Cost(replica_s, busy_s, gpu_s, usd, 1, life.parked_s)
    return costs


def total(costs: Costs) -> Cost:
    return sum(costs.values(), Cost())


@dataclass(frozen=True)
class StepCost:
    """The books of one step. `wall_s` is from the commit before to its own."""

    step: int
    wall_s: float = 0.0
    functions: Costs = field(default_factory=dict)

    @property
    def usd(self) -> float:
        return total(self.functions).usd

    def __add__(self, other: StepCost) -> StepCost:
        """Two executions' shares of one step."""
        return StepCost(self.step, self.wall_s + other.wall_s, merged(self.functions, other.functions))

    def to_json(self) -> Json:
        functions = {name: dataclasses.asdict(cost) for name, cost in self.functions.items()}
        return {"step": self.step, "wall_s": self.wall_s, "usd": self.usd, "functions": functions}

    @classmethod
    def from_json(cls, value: Any) -> StepCost:
        """Raises KeyError or TypeError for what is none."""
        functions = {name: Cost(**cost) for name, cost in value["functions"].items()}
        return cls(int(value["step"]), float(value["wall_s"]), functions)


def together(steps: Sequence[StepCost]) -> StepCost:
    """What `steps` cost in all, under the number 0."""
    return sum(steps, StepCost(0))


def merged(one: Costs, two: Costs) -> dict[str, Cost]:
    return {name: one.get(name, Cost()) + two.get(name, Cost()) for name in {**one, **two}}


@dataclass(frozen=True)
class Books:
    """All that cost.json holds."""

    steps: Sequence[StepCost]
    closed: StepCost
    """All of `steps` together."""
    open: StepCost
    executions: int

    @property
    def functions(self) -> dict[str, Cost]:
        return merged(self.closed.functions, self.open.functions)

    @property
    def wall_s(self) -> float:
        return self.closed.wall_s + self.open.wall_s

    @property
    def usd(self) -> float:
        return total(self.functions).usd

    def to_json(self, *, steps: bool = True) -> Json:
        """cost.json; `steps` False: without what each committed step cost."""
        return {
            "format": FORMAT,
            "usd": self.usd,
            "wall_s": self.wall_s,
            "functions": {name: dataclasses.asdict(cost) for name, cost in self.functions.items()},
            "executions": self.executions,
            "steps": [step.to_json() for step in self.steps] if steps else [],
            "open": self.open.to_json(),
        }


def read_books(path: Path) -> Books | None:
    """The books in `path`; None where there are none. Raises RunError for a file that holds none."""
    try:
        value = json.loads(path.read_text())
        if value["format"] != FORMAT:
            raise RunError(f"{path}: made by another version (format {value['format']!r}, this one reads {FORMAT})")
        steps = [StepCost.from_json(step) for step in value["steps"]]
        return Books(steps, together(steps), StepCost.from_json(value["open"]), int(value["executions"]))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path}: not a cost file ({error!r}); move it away to go on with new books") from error


class Ledger:
    """One execution's bookkeeping in `path` (cost.json). Not thread-safe. Times are those of the platform's usage.

    `next_step` is the step that will be committed next, by the journal: an execution that was killed right after a
    commit has not closed that step in its books, and it is closed here.
    """

    def __init__(self, path: Path, specs: Sequence[FunctionSpec], *, next_step: int, now_s: float) -> None:
        self._path, self._specs = path, specs
        before = read_books(path) or Books([], together([]), StepCost(next_step), 0)
        steps, left = list(before.steps), before.open
        if left.step < next_step and (left.wall_s or left.functions):
            steps.append(left)
            left = StepCost(next_step)
        self._steps, self._together = steps, together(steps)
        self._left = StepCost(next_step, left.wall_s, left.functions)
        """What executions before this one spent on the open step."""
        self._executions = before.executions + 1
        self._closed_s = now_s
        self._closed: Costs = {}
        self.books = self.count([], now_s)
        """As of the last `update` or `close_step`."""

    def count(self, usage: Sequence[Usage], now_s: float) -> Books:
        """The books at `now_s`; nothing is written."""
        self._now = costs_of(usage, self._specs, now_s)
        rise = {name: cost - self._closed.get(name, Cost()) for name, cost in self._now.items()}
        step = self._left + StepCost(self._left.step, now_s - self._closed_s, rise)
        return Books(self._steps, self._together, step, self._executions)

    def wall_s(self, now_s: float) -> float:
        """Seconds in which orchestrators have worked on the job by `now_s`."""
        return self._together.wall_s + self._left.wall_s + now_s - self._closed_s

    def update(self, usage: Sequence[Usage], now_s: float) -> Books:
        """Counts what has been spent by now, and writes it down: call it between steps' ends too, and at the end.

        Raises RunError where it cannot be written.
        """
        self.books = self.count(usage, now_s)
        write_atomically(self._path, json.dumps(self.books.to_json(), indent=1).encode() + b"\n")
        return self.books

    def close_step(self, step: int, usage: Sequence[Usage], now_s: float) -> StepCost:
        """`step` was committed: what was spent since the commit before it is its cost."""
        closed = dataclasses.replace(self.count(usage, now_s).open, step=step)
        self._steps.append(closed)
        self._together += closed
        self._left, self._closed, self._closed_s = StepCost(step + 1), self._now, now_s
        self.update(usage, now_s)
        return closed
