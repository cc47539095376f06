"""Goes on with a run from its last committed step."""

from __future__ import annotations

from argparse import Namespace

from orchestrator.commands.arguments import run_directory
from orchestrator.commands.run import work
from orchestrator.run.directory import RunDirectory
from orchestrator.run.events import failure_told
from orchestrator.session.session import Run, prepare

HELP = "go on with a run from its last committed step"
arguments = run_directory


def execute(given: Namespace) -> int:
    directory = RunDirectory.open(given.run)
    with failure_told(directory):
        prepared = prepare(directory.job)
    return work(Run(prepared, directory))
