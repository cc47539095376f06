"""Goes on with a run from its last committed step; settings that its history does not follow from may be others.

`steps` may: a run that has ended goes on with more. So may functions, prices, planner, limits, validation, telemetry,
how much is kept, and where models and data lie (orchestrator/run/identity.py has the list).
"""

from argparse import ArgumentParser, Namespace

from orchestrator.api.launch import OUTPUT
from orchestrator.commands.arguments import run_directory
from orchestrator.commands.keep_output import keep_output
from orchestrator.commands.run import work
from orchestrator.run.directory import RunDirectory
from orchestrator.run.events import failure_told
from orchestrator.run.stored import take_stored
from orchestrator.session.open_platform import check_machine
from orchestrator.session.session import Run, prepare

HELP = "go on with a run from its last committed step"
EXAMPLE = "rlhf-orchestrate resume runs/arithmetic steps=80"


def arguments(parser: ArgumentParser) -> None:
    run_directory(parser)
    parser.add_argument("--store", metavar="URL#RELEASE", help="where the run is kept: it comes from there")
    parser.add_argument("--keep-output", action="store_true", help="what is printed also goes to the run's output")
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="settings that may change, such as steps"
    )
    parser.add_argument("--from-step", type=int, metavar="N", help="go on from step N though later ones are lost")


def execute(given: Namespace) -> int:
    if given.store:
        take_stored(given.run.resolve(), given.store)
    directory = RunDirectory.open(given.run)
    if given.keep_output:
        keep_output(directory.path / OUTPUT)
    job = directory.changed_job(given.overrides) if given.overrides else directory.job
    with failure_told(directory):
        prepared = prepare(job)
        check_machine(prepared.job, prepared.specs)
    if given.overrides:
        directory.write_job(prepared.named)
    return work(Run(prepared, directory, from_step=given.from_step))
