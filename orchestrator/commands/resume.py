"""Goes on with a run from its last committed step."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from orchestrator.api.launch import OUTPUT
from orchestrator.commands.arguments import run_directory
from orchestrator.commands.keep_output import keep_output
from orchestrator.commands.run import work
from orchestrator.run.directory import RunDirectory
from orchestrator.run.events import failure_told
from orchestrator.session.session import Run, prepare

HELP = "go on with a run from its last committed step"


def arguments(parser: ArgumentParser) -> None:
    run_directory(parser)
    parser.add_argument("--keep-output", action="store_true", help="what is printed also goes to the run's output")
    parser.add_argument("--from-step", type=int, metavar="N", help="go on from step N though later ones are lost")


def execute(given: Namespace) -> int:
    directory = RunDirectory.open(given.run)
    if given.keep_output:
        keep_output(directory.path / OUTPUT)
    with failure_told(directory):
        prepared = prepare(directory.job)
    return work(Run(prepared, directory, from_step=given.from_step))
