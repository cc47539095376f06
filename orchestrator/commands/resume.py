"""Goes on with a run from its last committed step."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from orchestrator.commands.arguments import run_directory
from orchestrator.commands.run import work
from orchestrator.run.directory import RunDirectory
from orchestrator.run.events import failure_told
from orchestrator.session.open_platform import check_machine
from orchestrator.session.session import Run, prepare

HELP = "go on with a run from its last committed step"


def arguments(parser: ArgumentParser) -> None:
    run_directory(parser)
    parser.add_argument("--from-step", type=int, metavar="N", help="go on from step N though later ones are lost")


def execute(given: Namespace) -> int:
    directory = RunDirectory.open(given.run)
    with failure_told(directory):
        prepared = prepare(directory.job)
        check_machine(prepared.job, prepared.specs)
    return work(Run(prepared, directory, from_step=given.from_step))
