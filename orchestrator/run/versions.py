"""The job's models as versions: where they start, what identifies them, which are kept, and the final export."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from functions.base.wire import Version
from functions.exchange.base import checksum
from functions.weights.adapters import write_adapter
from functions.weights.base import import_model
from functions.weights.files import check_finite, check_vocabulary, weight_files
from functions.weights.manifest import keep_only, read_manifest
from functions.weights.materialize import materialize
from orchestrator.base.canonical import canonical
from orchestrator.base.errors import ConfigError, RunError
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.job.config import JobConfig
from orchestrator.job.functions import model_directory
from orchestrator.job.roles import CRITICS


def model_paths(job: JobConfig, models: Sequence[str]) -> dict[str, tuple[str, Path]]:
    """The directories that the job's models start from, and the keys that name them."""
    trained = ["actor", *(model for model in models if model in CRITICS)]
    own = [*(["reference"] if "reference" in models and job.reference.path is not None else []),
           *(["reward"] if job.reward.model is not None else [])]  # fmt: skip
    return {model: model_directory(job, model) for model in trained + own}


def check_models(job: JobConfig, models: Sequence[str]) -> None:
    """Raises ConfigError, naming the key, for a directory that holds no model, or one that contradicts itself."""
    paths = dict(model_paths(job, models).values())
    named = {"critic.path": job.critic.path, "reference.path": job.reference.path}  # wrong, though nobody may ask them
    paths |= {key: Path(path) for key, path in named.items() if path is not None}
    for key, path in paths.items():
        try:
            check_vocabulary(path, weight_files(path))
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from error


async def import_models(store: AsyncExchange, job: JobConfig, models: Sequence[str]) -> dict[str, Version]:
    """Version 0 of each of the job's models. A reference of its own only where the job names one."""
    paths = model_paths(job, models)
    versions: dict[str, Version] = {}
    for model, (key, path) in paths.items():

        def load(model: str = model, key: str = key, path: Path = path) -> Version:
            try:
                check_finite(path, weight_files(path))
                return import_model(store.exchange, model, path)
            except ValueError as error:
                raise ConfigError(f"{key}: {error}") from error

        versions[model] = await store.run(load)
    if "reference" in models:
        versions.setdefault("reference", versions["actor"])
    return versions


async def digests(store: AsyncExchange, versions: Mapping[str, Version]) -> dict[str, str]:
    """What each model's weights and optimizer state are, whatever call made them: a checksum over their hashes."""

    def digest(version: Version) -> str:
        manifest = read_manifest(store.exchange, version)
        entries = sorted((*manifest.tensors, *manifest.state), key=lambda entry: entry.name)
        return checksum(canonical([[entry.name, entry.hash] for entry in entries]))

    return {model: await store.run(partial(digest, version)) for model, version in versions.items()}


async def keep(
    store: AsyncExchange, history: Sequence[dict[str, Version]], count: int, also: Sequence[Mapping[str, Version]]
) -> None:
    """Deletes all but the newest `count` committed versions of each trained model, the one the job started from and
    `also` these."""
    for model in history[-1]:
        used = {v for versions in (history[0], *also, *history[-count:]) for v in versions.values() if v.model == model}
        if used:
            await store.run(partial(keep_only, store.exchange, model, used))


async def export(store: AsyncExchange, version: Version, directory: Path) -> Path:
    """The version as a Hugging Face directory; what was there is replaced once the new one is whole."""
    return await _replaced(store, directory, lambda new: materialize(store.exchange, version, new))


async def export_adapter(store: AsyncExchange, version: Version, directory: Path, base: str) -> Path:
    """The adapter of a LoRA version in peft's files, as `export`; `base`: what it names as its base model.

    Raises RunError for a version that has none.
    """
    manifest = await store.run(lambda: read_manifest(store.exchange, version))
    if manifest.adapter is None:
        raise RunError("--adapter: the job has trained all weights (model.lora_rank = 0); export the model instead")
    return await _replaced(store, directory, lambda new: write_adapter(store.exchange, manifest, new, base))


async def _replaced(store: AsyncExchange, directory: Path, write: Callable[[Path], Path]) -> Path:
    temporary = directory.with_name(f".{directory.name}.new")
    shutil.rmtree(temporary, ignore_errors=True)
    await store.run(lambda: write(temporary))
    shutil.rmtree(directory, ignore_errors=True)
    return temporary.rename(directory)
