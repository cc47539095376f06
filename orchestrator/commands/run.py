"""Runs a job from its file. All of it is in the run directory; `resume` goes on with it after a crash or a stop."""

import logging
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.console import Console

from functions.base.logs import About, log_lines
from orchestrator.base.errors import ConfigError, DataError
from orchestrator.commands.arguments import RUNS, job_file
from orchestrator.job.config import load_job
from orchestrator.run.directory import RunDirectory, unique_name
from orchestrator.session.open_platform import check_machine
from orchestrator.session.session import Run, prepare, train
from orchestrator.session.terminal_view import open_view

HELP = "run a job from its file"
EXAMPLE = "rlhf-orchestrate run examples/arithmetic/job.toml steps=10 train.lr=1e-4"


def arguments(parser: ArgumentParser) -> None:
    job_file(parser)
    parser.add_argument("--run-dir", type=Path, help="where the run is kept (default: runs/<name of the job>)")
    parser.add_argument("--platform", choices=("local", "knative"), help="where functions run, over platform.kind")
    parser.add_argument("--no-warm-parent", action="store_true", help="start each replica afresh: slower, less memory")


def execute(given: Namespace) -> int:
    overrides = [*given.overrides, *(["platform.warm_parent=false"] if given.no_warm_parent else [])]
    overrides += [f"platform.kind={given.platform}"] if given.platform else []
    job = load_job(given.job, overrides)
    path = given.run_dir or RUNS / job.name
    if job.platform.kind == "knative":  # others may have a job of its name there
        job = job.model_copy(update={"name": unique_name(job.name)})
    prepared = prepare(job)
    check_machine(job, prepared.specs)
    directory = RunDirectory.create(path, prepared.named)
    try:
        return work(Run(prepared, directory))
    except (ConfigError, DataError):  # found out late: the mended job may have its place
        directory.discard(job)
        raise


def work(run: Run) -> int:
    """Runs the job to its end, with the live view on a terminal and lines of JSON elsewhere."""
    console = Console()
    if console.is_terminal:
        logging.getLogger().addHandler(logging.NullHandler())  # the view has the screen
    else:
        log_lines(About({"job": run.job.name, "function": "orchestrator"}), stream=sys.stdout)
    model = train(run, open_view(console))
    print(f"model: {model}")
    return 0
