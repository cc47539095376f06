"""The policy of a run as files that others load: of its last committed step or another, while it runs and after it.

Without --adapter a Hugging Face directory, adapters merged into the weights; with it the adapter of a LoRA job as peft
has it. --push sends them to a repository of the Hub (made private where there is none); the token is HF_TOKEN's.
"""

import asyncio
from argparse import ArgumentParser, Namespace
from pathlib import Path

from orchestrator.base.errors import RunError
from orchestrator.base.outages import Outages
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.commands.arguments import run_directory
from orchestrator.job.hub import HubId, push
from orchestrator.recipes import find_recipe
from orchestrator.run.directory import RunDirectory
from orchestrator.run.journal import Journal
from orchestrator.run.versions import export, export_adapter

HELP = "the policy of a run as a Hugging Face directory, or its adapter"
EXAMPLE = "rlhf-orchestrate export runs/arithmetic arithmetic-model"


def arguments(parser: ArgumentParser) -> None:
    run_directory(parser)
    parser.add_argument("directory", type=Path, nargs="?", help="new directory (default: RUN/model or RUN/adapter)")
    parser.add_argument("--step", type=int, help="of this step, whose version must be kept (default: the last)")
    parser.add_argument("--adapter", action="store_true", help="the adapter of a LoRA job alone, as peft has it")
    parser.add_argument("--push", metavar="ORG/NAME", help="send it to this repository of the Hub, too")


def execute(given: Namespace) -> int:
    id = None if given.push is None else HubId.parse(given.push)
    if given.push is not None and (id is None or str(id) != id.repository):
        raise RunError(f"--push: got {given.push!r}, wants ORG/NAME")
    run = RunDirectory.open(given.run)
    place = given.directory or run.path / ("adapter" if given.adapter else "model")
    if given.directory is not None and place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise RunError(f"{place}: is there already; name a new directory")
    if given.directory is None and run.holder() is not None and not given.adapter:
        raise RunError(f"{run.path}: is being worked on, and will write {place}; name a directory")
    print(f"{'adapter' if given.adapter else 'model'}: {asyncio.run(_export(run, place, given.adapter, given.step))}")
    if id is not None:
        try:
            print(f"pushed: {push(place, id.repository)}")
        except ValueError as error:
            raise RunError(f"--push: {error}") from error
    return 0


async def _export(run: RunDirectory, place: Path, adapter: bool, step: int | None) -> Path:
    job = run.job
    product = find_recipe(job.recipe).product
    store = AsyncExchange(run.open_exchange(job), outages=Outages(0.0))
    journal = await Journal.open(store)
    last = next((record for record in journal.records if record.step == step), journal.last)
    if last is None:
        raise RunError(f"{run.path}: has committed nothing yet")
    if step is not None and last.step != step:
        raise RunError(f"--step: got {step}; {run.path} has committed steps 0 to {last.step}")
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        if not adapter:
            return await export(store, last.versions[product], place)
        base = HubId.parse(job.model.path)
        return await export_adapter(
            store, last.versions["actor"], place, job.model.path if base is None else base.repository
        )
    except RunError as error:
        raise RunError(f"{run.path}: step {last.step} cannot be exported: {error}") from error
