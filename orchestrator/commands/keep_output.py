"""What a process prints goes to its own stdout and, besides, to a file that outlives the machine it runs on."""

import atexit
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

LAST_S = 5.0
"""How long the end waits for the last lines."""


def keep_output(path: Path) -> None:
    """From here on stdout and stderr, of this process and of those it starts, are also appended to `path`, by tee(1).

    A file that cannot be written is done without: a run goes on, and stdout has everything.
    """
    before = os.dup(1)
    tee = subprocess.Popen(["tee", "-a", path], stdin=subprocess.PIPE, start_new_session=True)  # what ends us spares it
    assert tee.stdin is not None

    def to(target: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(target, 1)
        os.dup2(target, 2)

    to(tee.stdin.fileno())
    tee.stdin.close()

    def end() -> None:
        to(before)
        with suppress(subprocess.TimeoutExpired):
            tee.wait(LAST_S)

    atexit.register(end)
