"""A run as one HTML file: the dashboard's pictures, without a server."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from orchestrator.commands.arguments import run_directory
from orchestrator.run.directory import RunDirectory

HELP = "a run as one HTML file: the dashboard's pictures, without a server"
EXAMPLE = "rlhf-orchestrate report arithmetic -o arithmetic.html"


def arguments(parser: ArgumentParser) -> None:
    run_directory(parser)
    parser.add_argument("-o", "--output", type=Path, help="file to write (default: RUN/report.html)")


def execute(given: Namespace) -> int:
    from orchestrator.api.report import write_report  # `report --help` need not wait for FastAPI
    from orchestrator.simulation.reserved import update_reserved

    run = RunDirectory.open(given.run)
    if run.holder() is None:
        update_reserved(run)
    file = write_report(given.run, given.output)
    print(f"{file}: {file.stat().st_size / 1e6:.1f} MB")
    return 0
