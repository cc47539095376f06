"""One execution of a job on this machine: takes the run's lock and lease, puts the parts together, runs the loop.

run directory --lock--> lease (epoch) --> journal --> platform --> loop --> model/
"""

import asyncio
import logging
import os
import signal
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from functions.call.train_params import TrainParams
from orchestrator.base.errors import RunError, StateLost, Stopped
from orchestrator.base.outages import Outages
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.calls.fleet import Fleet
from orchestrator.calls.invoke import Invoker, RetryPolicy, Timeouts
from orchestrator.job.checks import check_code, check_options, check_replay, check_tests, check_turns
from orchestrator.job.config import JobConfig
from orchestrator.job.functions import check_room, check_split, function_limits, function_specs
from orchestrator.job.located import localized, pinned
from orchestrator.job.mesh import check_meshes
from orchestrator.job.prompts import PromptSource
from orchestrator.planner.base import Planner
from orchestrator.planner.scaling import Unmet
from orchestrator.platforms.base import FunctionSpec
from orchestrator.platforms.local import LocalPlatform
from orchestrator.recipes import Recipe, find_recipe
from orchestrator.recipes.settings import job_models, recipe_options, train_settings
from orchestrator.run.directory import RunDirectory
from orchestrator.run.events import EventLog, first_failure, open_events
from orchestrator.run.identity import take_lease
from orchestrator.run.journal import Journal, record_key
from orchestrator.run.user_files import carry
from orchestrator.run.versions import check_models, export
from orchestrator.session.alive import alive
from orchestrator.session.history import recorded_steps
from orchestrator.session.job_planner import job_planner
from orchestrator.session.loop import Loop
from orchestrator.session.open_platform import check_platform, open_platform
from orchestrator.session.recorder import Recorder
from orchestrator.session.scores import best_record
from orchestrator.session.view import Snapshot, View
from orchestrator.telemetry.open_sinks import check_sinks
from orchestrator.telemetry.otlp import check_exporter, open_tracing

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A job that was checked as far as it can be before anything is started or written."""

    job: JobConfig
    """Its models in directories of this machine."""
    named: JobConfig
    """As a run keeps it: models and data of the Hub by their ids, pinned to commits."""
    recipe: Recipe
    settings: dict[str, TrainParams]
    """Of each model that is trained."""
    source: PromptSource
    specs: list[FunctionSpec]


def prepare(job: JobConfig) -> Prepared:
    """Raises ConfigError or DataError, in one line, for a job that cannot run."""
    recipe = find_recipe(job.recipe)
    named = pinned(job)
    job = localized(named)
    settings, specs = check(job, recipe)
    source = PromptSource.load(job)
    source.check_given(recipe.given, job.rollout.max_response_length)
    check_room(job, function_limits(job, specs), source.longest)
    check_tests(job, [*source.train.rows, *source.held_out.rows])
    return Prepared(job, named, recipe, settings, source, specs)


def check(job: JobConfig, recipe: Recipe) -> tuple[dict[str, TrainParams], list[FunctionSpec]]:
    """All of `prepare` that needs no look at the data's rows, for a job whose files are here. Raises ConfigError."""
    settings = train_settings(job, recipe)
    recipe_options(job, recipe)
    models = job_models(recipe, settings)
    check_models(job, models)
    check_code(job)
    check_options(settings["actor"])
    check_turns(job, settings["actor"])
    check_replay(job, settings["actor"])
    check_exporter(job)
    check_sinks(job)
    specs = function_specs(job, models)
    job_planner(job, specs)
    check_split(job)
    check_meshes(job, specs)
    check_platform(job, specs)
    return settings, specs


@dataclass(frozen=True)
class Run:
    """A prepared job and where it lives."""

    prepared: Prepared
    directory: RunDirectory
    planner: Planner | None = None
    """Instead of the one that the job names."""
    from_step: int | None = None
    """Where to go on although later records of the journal are lost; None: a loss is refused."""
    lost: StateLost | None = None
    """What the execution before this one has met."""

    @property
    def job(self) -> JobConfig:
        return self.prepared.job


async def execute(run: Run, view: View) -> Path:
    """Runs the job from its last commit to its end; returns the directory of the final model.

    Raises OrchestratorError (one line). Whatever happens, functions go to zero before it returns.
    """
    with run.directory.lock(), open_events(run.directory.path) as events:
        try:
            return await _execute(run, view, events)
        except StateLost as lost:
            return await _execute(replace(run, from_step=None, lost=lost), view, events)


async def _execute(run: Run, view: View, events: EventLog) -> Path:
    job, path, specs = run.job, run.directory.path, run.prepared.specs
    outages = Outages(job.limits.outage_s, note=partial(told_early, job, view, events), seed=job.seed)
    exchange = await outages.bridge(lambda: asyncio.to_thread(run.directory.open_exchange, job))
    store = AsyncExchange(exchange, outages=outages)
    identity = run.directory.identity(job)
    epoch = await take_lease(store.durable, identity, f"{os.uname().nodename} {os.getpid()}")
    journal = await Journal.open(store.durable, identity)
    if run.lost is not None:
        await go_back(journal, events, path, run.lost)
    check_complete(journal, events, path, run.from_step)
    sent, settings = job, run.prepared.settings
    if job.platform.kind == "knative":
        sent, settings = await carry(store, job, settings)
    platform = open_platform(job, *run.directory.exchange(job), run=identity.id, log_dir=path / "logs")

    def waiting() -> str:
        return outages.line() or (platform.waiting() if isinstance(platform, LocalPlatform) else "")

    recorder = Recorder(job, path, store, journal.records, platform, specs, view, events, waiting)
    outages.note = recorder.note
    with open_tracing(job, recorder.note) as tracing:
        invoker = Invoker(
            platform,
            retry=RetryPolicy(attempts=job.limits.attempts),
            timeouts=Timeouts(heartbeat_s=job.limits.heartbeat_s),
            seed=job.seed,
            note=recorder.note,
            tracing=tracing,
            ended=recorder.counts.call_ended,
            outages=outages,
            probe=store.reachable,
        )
        fleet = Fleet(platform, invoker)
        planner = run.planner or job_planner(job, specs)
        for past in recorded_steps(job, path / "trace.json", journal.records, run.prepared.source):
            planner.recall(past, job.rollout.max_response_length)
        loop = Loop(
            job=sent,
            recipe=run.prepared.recipe,
            prompts=run.prepared.source,
            store=store,
            journal=journal,
            fleet=fleet,
            planner=planner,
            epoch=epoch,
            limits=function_limits(job, specs),
            settings=settings,
            state_every=1 if run.lost else job.checkpoints.state_every,  # calls may go now to this node, now to that
            cost=recorder.cost,
            on_plan=recorder.planned,
            on_report=recorder.keep,
            on_commit=recorder.committed,
        )
        knative = job.platform.knative
        parks = knative is not None and knative.node_agent is not None
        async with recorder.watching(fleet), alive(store, recorder.note, wanted=parks):
            for line in run.prepared.source.dropped:
                recorder.note(line)
            try:
                await outages.bridge(lambda: platform.deploy(specs))
                await loop.run()
            except Unmet as error:
                raise RunError(f"planner: {error}") from None
            finally:
                await platform.close()
        if not job.steps:
            return path
        best = None if job.checkpoints.best is None else best_record(journal.records, job.checkpoints.best)
        return await export(store, (best or journal.records[-1]).versions[run.prepared.recipe.product], path / "model")


def told_early(job: JobConfig, view: View, events: EventLog, message: str) -> None:
    """What is worth knowing before there is a recorder."""
    view.changed(Snapshot(job.name, job.recipe, max(0, events.last_step), job.steps, 0.0, note=message))
    try:
        events.append("note", {"message": message})
    except RunError:
        log.warning("%s", message)


def check_complete(journal: Journal, events: EventLog, path: Path, from_step: int | None) -> None:
    """Raises RunError where steps that were committed (the run's events tell) are in the journal no more.

    `from_step`: the user wants to go on without them, from the last record that is there (0 with none: from the start).
    """
    last, committed = len(journal.records) - 1, events.last_step
    if from_step is not None and from_step != max(0, last):
        raise RunError(f"--from-step: got {from_step}, the journal ends at step {max(0, last)}")
    if last >= committed:
        return
    if from_step is None:
        ends = f"ends at step {last}" if journal.records else "is empty"
        raise RunError(
            f"{path}: step {committed} was committed, but the journal {ends}: its records are lost; bring them back, "
            f"or go on without them: `rlhf-orchestrate resume {path} --from-step {max(0, last)}`"
        )
    events.forget(last, f"records after step {last} are lost; it goes on from there, as was asked for")


async def go_back(journal: Journal, events: EventLog, path: Path, lost: StateLost) -> None:
    """Takes back the steps after the last durable one; where there are none, what is lost is not to be had again."""
    last = len(journal.records) - 1
    if lost.step >= last:
        raise RunError(str(lost))
    events.forget(
        lost.step,
        f"{lost}: its node has lost the state of step {last}; the job goes back to step {lost.step}, and writes every "
        "state to the store from there on",
    )  # first: who is killed now finds records that were not told, not the other way around
    await journal.roll_back(lost.step)
    for step in range(lost.step + 1, last + 1):
        (path / record_key(step)).unlink(missing_ok=True)


async def ended(run: Run, view: View) -> Path:
    """`execute`, whose failure is the one that a user can read; Stopped where its task was cancelled."""
    try:
        return await execute(run, view)
    except asyncio.CancelledError:
        raise Stopped(f"stopped; go on with `rlhf-orchestrate resume {run.directory.path}`") from None
    except BaseExceptionGroup as group:
        raise first_failure(group) from None


def train(run: Run, view: View) -> Path:
    """`ended` in an event loop of its own; SIGINT and SIGTERM end it in order, with functions at zero."""

    async def main() -> Path:
        task = asyncio.current_task()
        assert task is not None, "inside asyncio.run"
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await ended(run, view)

    return asyncio.run(main())
