"""Brings a run of a cluster, with its model, from the store that it is kept in: `export`, `status`, `report` take it.

As it is now, while it runs and after it. Credentials of the store come from the environment (docs/exchange.md).
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from orchestrator.base.errors import RunError
from orchestrator.commands.arguments import RUNS
from orchestrator.run.directory import RunDirectory
from orchestrator.run.stored import exchanging, open_runs, run_mirror

HELP = "bring a run of a cluster to this machine"
EXAMPLE = "rlhf-orchestrate fetch arithmetic-3f9a1c0b2d --store 's3://rlhf/jobs#rl.rlhf-rlhf-orchestrate'"


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("job", help="the job's id")
    parser.add_argument(
        "--store", metavar="URL#RELEASE", required=True, help="where runs are kept: the notes of the chart say it"
    )
    parser.add_argument("--runs", type=Path, default=RUNS, help="where the run's directory is made (default: runs)")


def execute(given: Namespace) -> int:
    directory = given.runs / given.job
    if directory.exists():
        raise RunError(f"{directory}: is there already; name another place (--runs)")
    mirror = run_mirror(open_runs(given.store), directory)
    with exchanging():
        mirror.pull()
        mirror.fetch()
    print(RunDirectory.open(directory).path)
    return 0
