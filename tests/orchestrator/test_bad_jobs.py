"""Every key of a job, made wrong in every way: one line that names it, before anything is started or written.

The keys come from the schema, so that a new one is tried without being listed here.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from pydantic import BaseModel

from functions.call.train_params import TrainParams
from orchestrator.base.errors import OrchestratorError
from orchestrator.job.config import JobConfig, parse_job
from orchestrator.job.paths import PATHS
from orchestrator.job.sections import FunctionConfig
from orchestrator.session.session import prepare
from tests.support.tiny_job import make_job

Keys = tuple[str, ...]
WRONG: dict[str, Any] = {
    "nan": math.nan, "inf": math.inf, "minus inf": -math.inf, "a table": {"zz": {}}, "a list": [[]], "a date": "1-1",
    "minus one": -1, "huge": 10**30, "empty": "", "zero byte": "a\0b", "no utf-8": "\udcff", "true": True,
}  # fmt: skip
NEVER_RIGHT = {"nan", "inf", "minus inf", "a list"}


def keys_of(section: type[BaseModel], above: Keys = ()) -> Iterator[Keys]:
    for name, info in section.model_fields.items():
        kinds = [a for a in (info.annotation, *get_args(info.annotation)) if isinstance(a, type)]
        inner = next((kind for kind in kinds if issubclass(kind, BaseModel)), None)
        if inner is FunctionConfig:
            yield from keys_of(FunctionConfig, (*above, name, "train"))
        elif inner is not None:
            yield from keys_of(inner, (*above, name))
        else:
            yield (*above, name)


def params_of(kind: type, above: Keys) -> Iterator[Keys]:
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        yield (*above, field.name)
        for inner in (hints[field.name], *get_args(hints[field.name])):
            if dataclasses.is_dataclass(inner) and isinstance(inner, type):
                yield from params_of(inner, (*above, field.name))


KEYS = [*keys_of(JobConfig), *params_of(TrainParams, ("algorithm",))]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    job = make_job(tmp_path_factory.mktemp("job"))
    return tomllib.loads(job.file.read_text()), job.directory


def changed(table: dict[str, Any], keys: Keys, value: Any) -> dict[str, Any]:
    result = copy.deepcopy(table)
    inner = result
    for key in keys[:-1]:
        inner = inner.setdefault(key, {})
    inner[keys[-1]] = value
    return result


def told(table: dict[str, Any], base: Path) -> str | None:
    """What the user would read; None: the job is accepted. Anything but an OrchestratorError fails the test."""
    try:
        prepare(parse_job(table, base=base, where="job.toml"))
    except OrchestratorError as error:
        return str(error)
    return None


@pytest.mark.parametrize("keys", KEYS, ids=".".join)
def test_a_value_that_cannot_be_right(keys: Keys, table: tuple[dict[str, Any], Path]) -> None:
    job, base = table
    for what, value in WRONG.items():
        line = told(changed(job, keys, value), base)
        if line is None:
            assert what not in NEVER_RIGHT, f"{'.'.join(keys)} = {value!r} is accepted"
            continue
        assert line.strip(), "says nothing"
        assert "Traceback" not in line
        assert all(part.strip() for part in line.split("\n")), line
        assert any(key in line for key in keys), f"{'.'.join(keys)} = {value!r}: {line}"


SECTIONS = sorted({keys[:-1] for keys in keys_of(JobConfig)})


@pytest.mark.parametrize("section", SECTIONS, ids=".".join)
def test_a_key_that_is_none(section: Keys, table: tuple[dict[str, Any], Path]) -> None:
    job, base = table
    line = told(changed(job, (*section, "no_such_key"), 1), base)
    assert line is not None
    assert "no_such_key" in line


NAMED = [*PATHS, ("", "recipe"), ("reward", "score"), ("algorithm", "loss"), ("algorithm", "advantage")]


@pytest.mark.parametrize(("section", "key"), NAMED)
def test_a_file_that_is_not_there(section: str, key: str, table: tuple[dict[str, Any], Path]) -> None:
    job, base = table
    keys = (section, key) if section else (key,)
    value = "gone/none" if (section, key) in PATHS else "gone.py:none"
    given = changed(job, keys, value)
    if key == "model":
        given = changed(given, ("reward", "score"), "model")
    line = told(given, base)
    assert line is not None, f"{'.'.join(keys)} = {value!r} is accepted"
    assert "gone" in line
    (base / "there.py").write_text("import os\nhere = 1\n")
    line = None if (section, key) in PATHS else told(changed(job, keys, "there.py:her"), base)
    assert line is None or "her" in line


@pytest.mark.parametrize(
    ("score", "line"),
    [
        ("gsm8k", "reward.score: got 'gsm8k'; did you mean 'rule:gsm8k'?"),
        ("rule:gsm9k", "reward.score: there is no rule 'gsm9k'; did you mean 'rule:gsm8k'?"),
        ("rule:", "reward.score: there is no rule ''; rules are exact"),
        ("reward.py:scor", "has no 'scor'; did you mean 'score'?"),
        ("broken.py:score", "broken.py:2: unmatched ')'"),
        ("no.such.module:score", "there is no module 'no.such.module' here"),
    ],
)
def test_a_scorer_that_is_none(score: str, line: str, table: tuple[dict[str, Any], Path]) -> None:
    job, base = table
    (base / "broken.py").write_text("def score():\n  return )\n")
    found = told(changed(job, ("reward", "score"), score), base)
    assert found is not None
    assert line in found
