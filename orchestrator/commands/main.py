"""The command line. Every failure is one line on standard error and an exit code (orchestrator/base/errors.py)."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from functions.base.logs import LEVELS, About, log_lines
from orchestrator.base.errors import OrchestratorError, RunError
from orchestrator.commands import doctor_checks as doctor
from orchestrator.commands import tables
from orchestrator.commands.logs import Wanted, read_logs
from orchestrator.commands.plan import plan_parser
from orchestrator.commands.serving import report_parser, serve_parser, submit_parser, top_parser
from orchestrator.commands.simulate import simulate_parser
from orchestrator.job.config import load_job
from orchestrator.platforms.config import KnativeConfig
from orchestrator.recipes import RECIPES
from orchestrator.run.directory import RunDirectory
from orchestrator.run.events import failure_told
from orchestrator.session.session import Run, prepare, train
from orchestrator.session.terminal_view import open_view


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    given, more = parser.parse_known_args(arguments)
    if not hasattr(given, "overrides") or any(word.startswith("-") for word in more):
        given = parser.parse_args(arguments)  # says what is wrong
    else:
        given.overrides += more  # overrides may follow options, where argparse does not look for them
    try:
        code: int = given.command(given) or 0
    except OrchestratorError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # of what only looks on; a job that runs here ends in order (session.train)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlhf-orchestrate", description="RLHF where every stage is a function that exists only while it works."
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    run = commands.add_parser("run", help="run a job from its file")
    run.add_argument("job", type=Path, help="job file (TOML)")
    run.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings over those of the file")
    run.add_argument("--run-dir", type=Path, help="where the run is kept (default: runs/<name of the job>)")
    run.add_argument("--platform", choices=("local", "knative"), help="where functions run, over platform.kind")
    run.add_argument("--no-warm-parent", action="store_true", help="start each replica afresh: slower, less memory")
    run.set_defaults(command=_run)

    for name, command, text in (
        ("resume", _resume, "go on with a run from its last committed step"),
        ("status", _status, "how far a run has come"),
        ("cost", _cost, "replica-seconds and dollars by function and step"),
        ("cancel", _cancel, "stop the orchestrator that works on a run; what is committed stays"),
    ):
        sub = commands.add_parser(name, help=text)
        sub.add_argument("run", type=Path, help="run directory")
        sub.set_defaults(command=command)
        if name == "resume":
            sub.add_argument("--from-step", type=int, metavar="N", help="go on from step N though later ones are lost")

    plan_parser(commands)
    simulate_parser(commands)
    serve_parser(commands)
    submit_parser(commands)
    top_parser(commands)
    report_parser(commands)

    logs = commands.add_parser("logs", help="what the replicas of a run have printed")
    logs.add_argument("run", type=Path, help="run directory")
    logs.add_argument("--function", help="only of this function (generate, reward, train, ..., orchestrator)")
    logs.add_argument("--step", type=int, help="only of calls of this step")
    logs.add_argument("--call", default="", help="only of calls whose id begins so")
    logs.add_argument("--level", choices=LEVELS, default="debug", help="only of this level or above")
    logs.add_argument("--follow", action="store_true", help="go on while the run is worked on")
    logs.set_defaults(command=_logs)

    commands.add_parser("recipes", help="list the algorithms").set_defaults(command=_recipes)
    check = commands.add_parser("doctor", help="check this machine, or a job's exchange and model")
    check.add_argument("job", type=Path, nargs="?", help="job file (TOML)")
    check.add_argument("--platform", choices=("local", "knative"), default="local", help="check a cluster instead")
    check.set_defaults(command=_doctor)
    return parser


def _run(given: argparse.Namespace) -> int:
    overrides = [*given.overrides, *(["platform.warm_parent=false"] if given.no_warm_parent else [])]
    overrides += [f"platform.kind={given.platform}"] if given.platform else []
    job = load_job(given.job, overrides)
    prepared = prepare(job)
    return _train(Run(prepared, RunDirectory.create(given.run_dir or Path("runs") / job.name, job)))


def _resume(given: argparse.Namespace) -> int:
    directory = RunDirectory.open(given.run)
    with failure_told(directory):
        prepared = prepare(directory.job)
    return _train(Run(prepared, directory, given.from_step))


def _train(run: Run) -> int:
    console = Console()
    if console.is_terminal:
        logging.getLogger().addHandler(logging.NullHandler())  # the view has the screen
    else:
        log_lines(About({"job": run.job.name, "function": "orchestrator"}), stream=sys.stdout)
    model = train(run, open_view(console))
    print(f"model: {model}")
    return 0


def _status(given: argparse.Namespace) -> int:
    tables.print_status(RunDirectory.open(given.run))
    return 0


def _cost(given: argparse.Namespace) -> int:
    tables.print_cost(RunDirectory.open(given.run))
    return 0


def _cancel(given: argparse.Namespace) -> int:
    directory = RunDirectory.open(given.run)
    process = directory.holder()
    if process is None:
        raise RunError(f"{directory.path}: nobody is working on this run")
    os.kill(process, signal.SIGTERM)
    for _ in range(300):
        if directory.holder() != process:
            print(f"{directory.path}: stopped; go on with `rlhf-orchestrate resume {directory.path}`")
            return 0
        time.sleep(0.1)
    raise RunError(f"{directory.path}: process {process} has not ended within 30 s of SIGTERM")


def _logs(given: argparse.Namespace) -> int:
    wanted = Wanted(given.function, given.step, given.call, given.level)
    for replica, line in read_logs(RunDirectory.open(given.run), wanted, follow=given.follow):
        for row in str(line).splitlines():
            print(f"{replica} | {row}", flush=given.follow)
    return 0


def _recipes(_given: argparse.Namespace) -> int:
    for recipe in RECIPES.values():
        print(f"{recipe.name}\n    {recipe.summary}\n    {recipe.paper}")
        settings = ", ".join(f"{key} = {value!r}" for key, value in recipe.settings.items())
        print(f"    models: {', '.join(recipe.models)}\n    settings: {settings}\n")
    return 0


def _doctor(given: argparse.Namespace) -> int:
    job = None if given.job is None else load_job(given.job)
    if given.platform == "knative":
        from orchestrator.commands.doctor_knative import check

        config = job.platform.knative if job is not None else None
        exchange = [] if job is None or job.exchange.url is None else [doctor.exchange_check(job.exchange.url)]
        return doctor.report([*check(job, config or KnativeConfig(image="none")), *exchange])
    return doctor.report(doctor.check(job))
