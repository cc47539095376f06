"""From a model, or a run, to its gateway: the model lies where replicas find it, the function is deployed at zero."""

import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from functions.base.wire import LEASES, Hint, Load, Version, hint_key
from functions.exchange.base import Exchange
from functions.exchange.open import open_exchange
from functions.weights.base import import_model
from functions.weights.files import check_vocabulary, weight_files
from orchestrator.api.gateway.app import Served
from orchestrator.api.gateway.gateway import FUNCTION, SLICE_S, Gateway
from orchestrator.base.errors import ConfigError, RunError
from orchestrator.base.outages import Outages
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.job.config import JobConfig
from orchestrator.job.functions import function_specs, model_context
from orchestrator.job.hub import MODEL_FILES, HubId, snapshot
from orchestrator.job.prompts import load_chat
from orchestrator.run.directory import RunDirectory
from orchestrator.run.journal import Journal
from orchestrator.run.versions import export
from orchestrator.session.open_platform import check_machine, open_platform


@dataclass(frozen=True)
class Options:
    """Of a served model; what a run's job says of engine, dtype, slots and platform goes before the defaults here."""

    what: str
    """A Hugging Face directory, an id of the Hub, or a run directory."""
    name: str | None = None
    replicas: int = 1
    slots: int | None = None
    engine: str | None = None
    dtype: str | None = None
    idle_s: float = 60.0
    slice_s: float = SLICE_S

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"--replicas: got {self.replicas}, wants 1 or more")
        if self.slots is not None and self.slots < 1:
            raise ConfigError(f"--slots: got {self.slots}, wants 1 or more")
        if not self.idle_s > 0:
            raise ConfigError(f"--idle-s: got {self.idle_s:g}, wants more than 0")


@asynccontextmanager
async def opened(options: Options) -> AsyncIterator[Served]:
    """The model behind a gateway that nobody works for yet. Raises OrchestratorError, one line."""
    with tempfile.TemporaryDirectory(prefix="rlhf-serve-") as scratch:
        place = Path(scratch)
        job, directory = await _model(options, place)
        name, chat = options.name or Path(options.what).resolve().name, load_chat(directory)
        [spec] = [spec for spec in function_specs(job, ()) if spec.name == FUNCTION]
        spec = replace(spec, max_replicas=options.replicas)
        check_machine(job, [spec])
        url, root = job.exchange.url or f"dir://{place / 'exchange'}", f"{job.name}-serve-{place.name[-8:].lower()}"
        exchange = open_exchange(url, root)
        store = AsyncExchange(exchange, outages=Outages(60.0))
        platform = open_platform(job, url, root, run=root, log_dir=place / "logs")
        try:
            version = await store.run(lambda: _published(exchange, directory))
            await platform.deploy([spec])
            gateway = Gateway(
                platform, store, version, replicas=options.replicas, slots=job.rollout.slots, idle_s=options.idle_s,
                slice_s=options.slice_s,
            )  # fmt: skip
            yield Served(name, chat, model_context(job), gateway)
        finally:
            await platform.close()
            if job.exchange.url is not None:
                await store.delete("")


async def _model(options: Options, place: Path) -> tuple[JobConfig, Path]:
    """A job that says how it is served, and the model's directory."""
    path = Path(options.what)
    table = {"name": "model", "steps": 1, "data": {"train": "none"}, "model": {"path": str(path)}}
    if (path / "run.json").exists():
        run = RunDirectory.open(path)
        job = run.job
        store = AsyncExchange(run.open_exchange(job), outages=Outages(0.0))
        last = (await Journal.open(store)).last
        if last is None:
            raise RunError(f"{path}: has committed nothing yet; name the model's directory instead")
        directory = await export(store, last.versions["actor"], place / "model")
        job = job.model_copy(update={"name": f"{job.name[:40]}-serve", "deterministic": False})
        if job.exchange.url is None or job.platform.kind == "local":
            job = job.model_copy(update={"exchange": JobConfig.model_validate(table).exchange})
    else:
        directory = _directory(options.what)
        job = JobConfig.model_validate(table)
    changes = {"slots": options.slots, "engine": options.engine}
    rollout = job.rollout.model_copy(update={key: value for key, value in changes.items() if value is not None})
    model = job.model.model_copy(update={"path": str(directory), **({"dtype": options.dtype} if options.dtype else {})})
    return job.model_copy(update={"rollout": rollout, "model": model}), directory


def _directory(what: str) -> Path:
    path, id = Path(what), HubId.parse(what)
    if not path.exists() and id is not None:
        try:
            path = Path(snapshot(id, "model", MODEL_FILES))
        except ValueError as error:
            raise ConfigError(f"{what}: {error}") from error
    try:
        check_vocabulary(path, weight_files(path))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{what}: neither a model's directory, a run's, nor an id of the Hub: {error}") from error
    return path


def _published(exchange: Exchange, directory: Path) -> Version:
    """The model as version 0, and a hint, so that replicas load it as they start."""
    version = import_model(exchange, "actor", directory)
    exchange.durable.put(f"{LEASES}000001", b"")
    hint = Hint(1, [Load("generate", {"policy": version})])
    exchange.put(hint_key(FUNCTION), json.dumps(hint.to_json()).encode())
    return version
