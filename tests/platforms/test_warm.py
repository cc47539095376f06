"""The warm parent (functions/server/warm.py): what tests of the local platform cannot time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

START = """
import os, socket, sys, time
from functions.server import warm

fork = os.fork

def fork_and_die():
    parent = os.getpid()
    if fork():
        os._exit(0)
    while os.getppid() == parent:
        time.sleep(0.01)
    return 0

os.fork = fork_and_die
settings = {"kind": "reward", "exchange": sys.argv[1] + "/exchange", "job": "job", "name": "orphan"}
warm.WarmParent(socket.socketpair()[0]).start(settings, socket=sys.argv[1] + "/socket", log=sys.argv[1] + "/log")
"""


def test_a_replica_whose_parent_dies_right_after_the_fork_goes_too(tmp_path: Path) -> None:
    """The kernel tells of a parent's death only if asked before it: who asks too late has to look."""
    done = subprocess.run(
        [sys.executable, "-c", START, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert "is gone" in done.stderr
    assert not (tmp_path / "log").exists(), "it never served"
