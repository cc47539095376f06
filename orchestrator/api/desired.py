"""`api.json` in a run directory: what the API was asked to do with the run. All else is in the run's own files."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from orchestrator.base.errors import RunError

FILE = "api.json"
Wanted = Literal["run", "stop", "rest"]
"""run: to its end; stop: is being cancelled; rest: nothing."""


@dataclass(frozen=True)
class Desired:
    name: str
    """The job's name as it was submitted; in its run directory the job is called by its id."""
    created_at: float
    """Unix seconds."""
    owner: str = ""
    """The name of the token that submitted it."""
    wanted: Wanted = "rest"
    why: str = ""
    """What it waits for, or why it was stopped, where its events do not say."""
    launches: int = 0
    launched_after: int | None = None
    """The last event's id when it was launched; None: to be launched."""
    restarts: int = 0
    """Launches after its orchestrator was killed, since the last submit or resume."""

    def encode(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Of a run that `rlhf-orchestrate run` made: at rest, named as its directory."""
        path = directory / FILE
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            return cls(directory.name, (directory / "run.json").stat().st_mtime)
        except (OSError, ValueError, TypeError) as error:
            raise RunError(f"{path}: cannot be read: {error}") from error
