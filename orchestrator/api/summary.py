"""What a run's events add up to, read as they come: only what was appended since the last look is parsed."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from functions.base.wire import Json
from orchestrator.run.events import END_TYPES, EventType, RunEvent, read_events


@dataclass
class Summary:
    """A run's events, folded."""

    last_id: int = 0
    execution: int = 0
    started_at: float | None = None
    """First start; Unix seconds."""
    end: RunEvent | None = None
    """How the last execution ended; None while it has not, and where it was killed."""
    step: int | None = None
    """The last committed one."""
    cost_usd: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last step, those that step and validation events tell."""
    stages: list[str] = field(default_factory=list)
    replicas: dict[str, int] = field(default_factory=dict)
    commits: list[RunEvent] = field(default_factory=list)
    """The step events."""
    sample_failures: int = 0

    def add(self, event: RunEvent) -> None:
        data = event.data
        self.last_id = event.id
        if event.type == "started":
            self.execution, self.end = data["execution"], None
            self.started_at = self.started_at or event.time
        elif event.type == "stage":
            self.stages, self.replicas = data["stages"], data["replicas"]
        elif event.type == "step":
            self.step, self.cost_usd = data["step"], data["cost_usd"]
            self.metrics |= data["metrics"]
            self.commits.append(event)
        elif event.type == "validation":
            self.metrics |= data["metrics"]
        elif "back_to" in data:
            self.step = data["back_to"]
            self.commits = [commit for commit in self.commits if commit.data["step"] <= self.step]
        elif event.type == "sample_failures":
            self.sample_failures += data["count"]
        elif event.type in END_TYPES:
            self.end, self.stages, self.replicas = event, [], {}

    @property
    def ended(self) -> EventType | None:
        return None if self.end is None else self.end.type

    @property
    def message(self) -> str | None:
        message: Json | str | None = None if self.end is None else self.end.data.get("message")
        return None if message is None else str(message)


class SummaryFile:
    """The summary of one events.jsonl. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._offset = 0, 0
        self.summary = Summary()

    def read(self) -> Summary:
        """Raises RunError for a file that holds no events."""
        try:
            stat = os.stat(self._path)
        except FileNotFoundError:
            self._inode, self._offset, self.summary = 0, 0, Summary()
            return self.summary
        if stat.st_ino != self._inode or stat.st_size < self._offset:
            self._inode, self._offset, self.summary = stat.st_ino, 0, Summary()
        if stat.st_size > self._offset:
            events, self._offset = read_events(self._path, start=self._offset)
            for event in events:
                self.summary.add(event)
        return self.summary
