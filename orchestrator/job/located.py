"""A job whose models and data may be ids of the Hub: pinned to commits, and with its models in directories here.

`job.toml` of a run keeps the pinned ids, so that a resume, on another machine too, finds what the run began with.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.base.errors import ConfigError
from orchestrator.job import hub_data
from orchestrator.job.config import JobConfig
from orchestrator.job.hub import MODEL_FILES, HubId, snapshot
from orchestrator.job.paths import PATHS


def pinned(job: JobConfig, *, cached_only: bool = False) -> JobConfig:
    """Each id with the commit that it means now, all that it names in the cache.

    cached_only: nothing is asked of the Hub. Raises ConfigError, one line for each that cannot be had.
    """

    def pin(section: str, key: str, id: HubId) -> str:
        if section == "data":
            return str(hub_data.find(id, key, cached_only=cached_only).id)
        if id.config or id.split:
            raise ValueError(f"{id}: a model's id is ORG/NAME, or ORG/NAME@REVISION")
        return str(id.at(snapshot(id, "model", MODEL_FILES, cached_only=cached_only).name))

    return _replaced(job, pin)


def localized(job: JobConfig) -> JobConfig:
    """The ids of models as directories in the cache; those of data stay (`data_files`). Raises ConfigError."""

    def locate(section: str, key: str, id: HubId) -> str:
        return str(id) if section == "data" else str(snapshot(id, "model", MODEL_FILES))

    return _replaced(job, locate)


def data_files(name: str, key: str) -> list[Path]:
    """The files of `data.train` or `data.validation`. Raises ConfigError."""
    id = HubId.parse(name)
    try:
        return [Path(name)] if id is None else list(hub_data.find(id, key).paths)
    except ValueError as error:
        raise ConfigError(f"data.{key}: {error}") from error


def _replaced(job: JobConfig, change: Callable[[str, str, HubId], str]) -> JobConfig:
    sections, mistakes = dict[str, Any](), list[str]()
    for section, key in PATHS:
        config = sections.get(section, getattr(job, section))
        value = getattr(config, key)
        id = None if value is None else HubId.parse(value)
        if id is None:
            continue
        try:
            sections[section] = config.model_copy(update={key: change(section, key, id)})
        except ValueError as error:
            mistakes.append(f"{section}.{key}: {error}")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return job.model_copy(update=sections) if sections else job
