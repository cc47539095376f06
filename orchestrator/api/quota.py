"""What a token's jobs may have: `name write token jobs=2 gpus=8 usd_per_day=100` (auth.py). Nothing said: no limit.

A job waits while its owner's others have what it would need; one that could never start is refused as it is submitted.
Who has spent a day's dollars within the last 24 hours gets no start, and what runs is stopped at its last commit; it
goes on by `resume`. What was spent counts until the day is over, so that such a job cannot be deleted before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

from orchestrator.api.summary import Summary
from orchestrator.base.errors import ConfigError
from orchestrator.job.config import JobConfig

DAY_S = 86400.0


@dataclass(frozen=True)
class Quota:
    jobs: int | None = None
    """At a time."""
    gpus: int | None = None
    """Most that its running jobs could hold together at a time."""
    usd_per_day: float | None = None

    @classmethod
    def parse(cls, words: Sequence[str], where: str) -> Self:
        """`key=value` words. Raises ConfigError."""
        found: dict[str, float] = {}
        for word in words:
            key, _, value = word.partition("=")
            try:
                found[key] = float(value) if key == "usd_per_day" else int(value)
            except ValueError:
                found[key] = -1.0
            if key not in (f.name for f in fields(cls)) or not 0 < found[key] < float("inf"):
                raise ConfigError(f"{where}: got {word!r}, wants jobs=, gpus= or usd_per_day= and a number above 0")
        return cls(**found)  # type: ignore[arg-type]  # as they were read

    def never(self, job: JobConfig) -> str | None:
        """Why the job could not start even if nothing else ran."""
        if self.gpus is not None and most_gpus(job) > self.gpus:
            return f"may hold {most_gpus(job)} GPUs at a time (functions.*.replicas times gpus), its token {self.gpus}"
        return None

    def reached(self, running: Sequence[JobConfig], more: JobConfig | None, spent_usd: float) -> str | None:
        """What keeps `more` from starting beside those that run; None as `more`: what keeps them from going on."""
        if self.usd_per_day is not None and spent_usd >= self.usd_per_day:
            return f"${spent_usd:.2f} of ${self.usd_per_day:.2f} were spent within 24 hours"
        if more is None:
            return None
        if self.jobs is not None and len(running) >= self.jobs:
            return f"{len(running)} of {self.jobs} jobs run"
        gpus = sum(map(most_gpus, running))
        if self.gpus is not None and gpus + most_gpus(more) > self.gpus:
            return f"{gpus} of {self.gpus} GPUs are taken, and it may hold {most_gpus(more)}"
        return None


UNLIMITED = Quota()


def most_gpus(job: JobConfig) -> int:
    """Most that the job could hold at a time."""
    return sum(function.gpus * function.replicas for function in job.functions.values())


def spent_usd(summary: Summary, now_usd: float | None, now_s: float) -> float:
    """What a job has cost in the 24 hours before `now_s` (Unix seconds). `now_usd`: its books now, if it has some."""
    before = [e.data["cost_usd"] for e in summary.commits if e.time < now_s - DAY_S]
    return max(now_usd or 0.0, summary.cost_usd or 0.0) - max(before, default=0.0)
