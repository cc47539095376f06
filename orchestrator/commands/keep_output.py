"""What a process prints goes to its own stdout and, besides, to a file that outlives the machine it runs on."""

import atexit
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

LAST_S = 5.0
"""How long the end waits for the last lines."""


def keep_output(path: Path) -> None:
    """From here on stdout and stderr, of this process and of those it starts, are also appended to `path`.

    A file that cannot be written is done without: a run goes on, and stdout has everything.
    """
    file = None
    with suppress(OSError):
        file = path.open("ab", buffering=0)
    read, write = os.pipe()
    before = os.dup(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(write, 1)
    os.dup2(write, 2)
    os.close(write)

    def copy() -> None:
        while block := os.read(read, 1 << 16):
            with suppress(OSError):
                os.write(before, block)
            with suppress(OSError):
                if file is not None:
                    file.write(block)

    thread = threading.Thread(target=copy, name="output", daemon=True)
    thread.start()

    def end() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(before, 1)
        os.dup2(before, 2)
        thread.join(LAST_S)

    atexit.register(end)
