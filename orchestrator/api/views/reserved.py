"""A run's reserved.json: made anew, beside the server, as the run goes on."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

from functions.base.wire import Json

FILE = "reserved.json"
NOTHING: Json = {"steps": None}
AGAIN = 2
"""It is made anew when the run has so many times the steps that it was made of, and when the run has ended."""


def read_reserved(path: Path) -> Json:
    """The Reserved of models.py; NOTHING where there is no file, or one that is none."""
    try:
        found: Json = json.loads((path / FILE).read_text())
    except (OSError, ValueError):
        return NOTHING
    return found if "steps" in found and "of" in found else NOTHING


class ReservedRuns:
    """Simulations take seconds of CPU: `rlhf-orchestrate cost` makes them, one at a time, behind all other work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tried: dict[Path, int] = {}
        """By run: how many steps it had when one was begun last."""
        self._process: subprocess.Popen[bytes] | None = None

    def read(self, path: Path, steps: int, *, ended: bool) -> Json:
        """Of a run with so many committed steps after step 0. As it is now: what is begun here is there later."""
        found = read_reserved(path)
        with self._lock:
            seen = max(self._tried.get(path, 0), found.get("of", 0))
            idle = self._process is None or self._process.poll() is not None
            if idle and (steps >= max(1, AGAIN * seen) or (ended and steps > seen)):
                self._tried[path] = steps
                self._process = self._start(path)
        return found

    def _start(self, path: Path) -> subprocess.Popen[bytes]:
        nice = [which, "-n", "19"] if (which := shutil.which("nice")) else []
        words = [*nice, sys.executable, "-m", "orchestrator.commands", "cost", str(path), "--json"]
        env, no = os.environ | {"OMP_NUM_THREADS": "1"}, subprocess.DEVNULL
        return subprocess.Popen(words, env=env, stdin=no, stdout=no, stderr=no)
