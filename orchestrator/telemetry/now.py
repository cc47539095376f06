"""`now.json`: the replicas of a run as they are, for whoever looks on; trace.json has a step's once it is committed.

    at_s      when this was written, in seconds since the job's first execution began (as everything here)
    step      the step at work           usd, replica_s   of the job until the last look into the books
    wall_s    in which orchestrators have worked on the job, until at_s
    lives     [{function, replica, start_s, stop_s (null: exists), phases: [[state, since_s], ...]}]

Lives are those that trace.json does not have yet: of replicas that exist, and of those that went since the last
commit. Of a life that goes on over commits, the phases before the last one are given up, but for its start. Phases are
seen by looking (recorder.py, VIEW_EVERY_S); when one began is exact. A killed execution leaves the file as it was:
`at_s` is the last that is known of its replicas.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from functions.base.wire import Json
from orchestrator.base.errors import RunError
from orchestrator.base.files import write_atomically
from orchestrator.platforms.base import Replica
from orchestrator.run.ledger import Books, total

FORMAT = 1
FILE = "now.json"


@dataclass
class _Life:
    function: str
    replica: str
    start_s: float
    phases: list[tuple[str, float]] = field(default_factory=list)
    stop_s: float | None = None

    def to_json(self) -> Json:
        return {
            "function": self.function, "replica": self.replica, "start_s": round(self.start_s, 4),
            "stop_s": None if self.stop_s is None else round(self.stop_s, 4),
            "phases": [[state, round(since_s, 4)] for state, since_s in self.phases],
        }  # fmt: skip


class Now:
    """Keeps `directory`/now.json. `job_s` turns event-loop seconds into the job's."""

    def __init__(self, directory: Path, job_s: Callable[[float], float]) -> None:
        self._path, self._job_s = directory / FILE, job_s
        self._lives: dict[tuple[str, str], _Life] = {}
        self._gone: list[_Life] = []

    def look(self, replicas: Sequence[Replica], now_s: float) -> None:
        """What exists now."""
        at_s = self._job_s(now_s)
        for replica in replicas:
            since_s = self._job_s(replica.since_s)
            life = self._lives.setdefault(
                (replica.function, replica.name), _Life(replica.function, replica.name, since_s)
            )
            if not life.phases or life.phases[-1] != (replica.state, since_s):
                life.phases.append((replica.state, since_s))
        existing = {(replica.function, replica.name) for replica in replicas}
        for key in [key for key in self._lives if key not in existing]:
            life = self._lives.pop(key)
            life.stop_s = at_s
            self._gone.append(life)

    def committed(self) -> None:
        """A step is in the trace, with all that had ended by then."""
        self._gone = []
        for life in self._lives.values():
            life.phases = life.phases[-1:]

    def write(self, step: int, books: Books, now_s: float, wall_s: float | None = None) -> None:
        """`wall_s`: of the job until now; None: as the books have it. Raises RunError where it cannot be written."""
        value: Json = {
            "format": FORMAT,
            "at_s": round(self._job_s(now_s), 4),
            "step": step,
            "usd": books.usd,
            "replica_s": total(books.functions).replica_s,
            "wall_s": books.wall_s if wall_s is None else wall_s,
            "lives": [life.to_json() for life in (*self._gone, *self._lives.values())],
        }
        write_atomically(self._path, json.dumps(value, allow_nan=False).encode() + b"\n", flush=False)


def read_now(path: Path) -> Json | None:
    """None where there is none. Raises RunError for a file that holds something else."""
    try:
        value = json.loads(path.read_bytes())
        if value["format"] != FORMAT:
            raise RunError(f"{path}: made by another version (format {value['format']!r}, this one reads {FORMAT})")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path}: cannot be read: {error!r}") from error
    return dict(value)


class NowFile:
    """now.json of a run, read again when it was written again. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._value: Json | None = None

    def read(self) -> Json | None:
        """As `read_now`."""
        try:
            stat = os.stat(self._path)
        except FileNotFoundError:
            return None
        if self._stamp != (stat.st_ino, stat.st_mtime_ns):
            self._value = read_now(self._path)
            self._stamp = (stat.st_ino, stat.st_mtime_ns)
        return self._value
