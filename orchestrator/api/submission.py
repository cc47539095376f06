"""A job as it comes over HTTP: read, confined (confinement.py), put over the installation's defaults, validated.

Relative paths are those of the first data root. Models and data sets of the Hub are taken from this server's cache:
for a request nothing is downloaded, and no token of the server's is used.
"""

import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.api import confinement
from orchestrator.api.problems import ApiError
from orchestrator.base.errors import OrchestratorError
from orchestrator.job.checks import check_code, check_object
from orchestrator.job.config import JobConfig, parse_job
from orchestrator.job.located import localized, pinned
from orchestrator.recipes import find_recipe
from orchestrator.recipes.settings import merged, recipe_options, train_settings
from orchestrator.session.open_platform import check_machine
from orchestrator.session.session import check, prepare

JSON_TYPE, TOML_TYPE = "application/json", "application/toml"
DEEPEST = 32
READ_BYTES = 8 << 20
"""Of data: with more, its rows are looked at by the job alone, for nobody waits so long for an answer."""
WHOLE = 2**63
"""What TOML can hold: -WHOLE <= n < WHOLE."""


def read_job(
    body: bytes, content_type: str, *, roots: Sequence[Path], defaults: Mapping[str, Any], here: bool = False
) -> JobConfig:
    """The job in a request's body. Raises ApiError 415 or 422, with one line per mistake.

    `here`: its orchestrator will run on this machine, so that all that `run` would refuse can be known.
    """
    table = _parse(body, content_type.partition(";")[0].strip().lower())
    mistakes = list(_unfit("", table, 0)) or list(confinement.refused(table, roots, defaults))
    if mistakes:
        raise ApiError(422, "the job holds values that jobs of this server cannot", mistakes)
    try:
        job = pinned(parse_job(merged(defaults, table), base=roots[0]), cached_only=True)
        _check(job, here)
    except OrchestratorError as error:
        raise ApiError(422, "the job cannot be what it says", str(error).splitlines()) from error
    return job


def _check(job: JobConfig, here: bool) -> None:
    """Raises OrchestratorError for what `run` would refuse, as far as it can be known on this machine."""
    if ".py:" in job.recipe:  # a user's own runs where the job runs, not here
        if here:
            check_object("recipe", job.recipe)
            check_code(job)
        return
    recipe = find_recipe(job.recipe)
    if not here:
        train_settings(job, recipe)
        recipe_options(job, recipe)
        return
    known = _data_bytes(job) <= READ_BYTES and job.environment is None  # which is opened where the job runs
    specs = prepare(job).specs if known else check(localized(job), recipe)[1]
    check_machine(job, specs)


def _data_bytes(job: JobConfig) -> int:
    paths = [Path(path) for path in (job.data.train, job.data.validation) if path is not None]
    return sum(path.stat().st_size for path in paths if path.is_file())


def _parse(body: bytes, media_type: str) -> dict[str, Any]:
    if media_type not in (JSON_TYPE, TOML_TYPE):
        raise ApiError(415, f"a job is {JSON_TYPE} or {TOML_TYPE}, got {media_type or 'no Content-Type'}")
    try:
        text = body.decode()
        value = json.loads(text) if media_type == JSON_TYPE else tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # of UTF-8, JSON or TOML
        raise ApiError(422, f"the body is not {media_type}", [f"body: {error}"]) from error
    if not isinstance(value, dict):
        raise ApiError(422, "the job cannot be what it says", ["body: want an object with the keys of a job"])
    return value


def _unfit(path: str, value: Any, depth: int) -> Iterator[str]:
    """What a job file cannot hold, or a file name must not."""
    where = path or "job"
    if depth > DEEPEST:
        yield f"{where}: nested more than {DEEPEST} deep"
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _text(where, key)
            yield from _unfit(f"{path}.{key}" if path else key, inner, depth + 1)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _unfit(f"{path}.{i}", inner, depth + 1)
    elif isinstance(value, str):
        yield from _text(where, value)
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{where}: should be a finite number, got {value}"
    elif isinstance(value, int) and not -WHOLE <= value < WHOLE:
        yield f"{where}: should fit in 64 bits, got a number of {value.bit_length()} bits"
    elif value is None and path.startswith(("algorithm.", "recipe_options.")):
        yield f"{where}: null is nothing that a job file can say; leave the key out"
    elif value is not None and not isinstance(value, bool | int | float):
        yield f"{where}: {type(value).__name__} is nothing that a job takes"


def _text(where: str, text: str) -> Iterator[str]:
    if any(not character.isprintable() for character in text):
        yield f"{where}: {text[:60]!r} has characters that cannot be printed"
