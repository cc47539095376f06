"""What whoever watches a job is shown: snapshots, plain values. On a terminal: terminal_view.py."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Snapshot:
    """A job at one moment."""

    job: str
    recipe: str
    step: int
    """Committed steps."""
    steps: int
    elapsed_s: float
    """Of this execution."""
    stages: Sequence[str] = ()
    """At work now, in the order in which they began."""
    replicas: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By function: (how many exist now, how many may)."""
    headline: str = "reward"
    """What each committed step is followed by (telemetry/headline.py),"""
    headlines: Sequence[float] = ()
    """and its values."""
    validations: Sequence[float] = ()
    """Held-out pass rate, each time it was measured."""
    validation_name: str = ""
    tokens_per_s: float | None = None
    """Of the last step."""
    cost_usd: float = 0.0
    replica_s: float = 0.0
    """Seconds of replicas, which are what is shown where no function has a price."""
    left_s: float | None = None
    """Expected until the job's end; None: not known yet."""
    note: str = ""
    """One line worth knowing: a retry, dropped samples."""


class View:
    """Whoever watches a job; as it is here, nobody."""

    def changed(self, snapshot: Snapshot) -> None:
        """Something other than a committed step has changed."""

    def committed(self, snapshot: Snapshot) -> None:
        """A step was committed."""

    def close(self) -> None:
        """Nothing will follow."""


def later(snapshot: Snapshot, seconds: float) -> Snapshot:
    """The same state `seconds` later."""
    left_s = None if snapshot.left_s is None else max(0.0, snapshot.left_s - seconds)
    return replace(snapshot, elapsed_s=snapshot.elapsed_s + seconds, left_s=left_s)


def time_left_s(step: int, steps: int, step_s: Sequence[float]) -> float | None:
    """Expected time of the remaining steps, from the median of the last ten steps' times; None before the first."""
    if not step_s:
        return None
    recent = sorted(step_s[-10:])
    return recent[len(recent) // 2] * (steps - step)
