"""Stops the orchestrator that works on a run; what is committed stays, and `resume` goes on from there."""

import os
import signal
import time
from argparse import Namespace

from orchestrator.base.errors import RunError
from orchestrator.commands.arguments import run_directory
from orchestrator.run.directory import RunDirectory

HELP = "stop the orchestrator that works on a run; what is committed stays"
EXAMPLE = "rlhf-orchestrate cancel arithmetic"
WAIT_S, LOOK_EVERY_S = 30.0, 0.1
arguments = run_directory


def execute(given: Namespace) -> int:
    directory = RunDirectory.open(given.run)
    process = directory.holder()
    if process is None:
        raise RunError(f"{directory.path}: nobody is working on this run")
    os.kill(process, signal.SIGTERM)
    until = time.monotonic() + WAIT_S
    while directory.holder() == process:
        if time.monotonic() > until:
            raise RunError(f"{directory.path}: process {process} has not ended within {WAIT_S:g} s of SIGTERM")
        time.sleep(LOOK_EVERY_S)
    print(f"{directory.path}: stopped; go on with `rlhf-orchestrate resume {directory.path}`")
    return 0
