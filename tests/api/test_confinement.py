"""No key of a job that comes over HTTP names what is the server's: every key that can hold text is tried."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from orchestrator.api.confinement import RULES, rule_of, server, text_keys
from orchestrator.api.problems import ApiError
from orchestrator.api.submission import JSON_TYPE, read_job
from orchestrator.job.config import JobConfig

OPENS_NOTHING = {
    "telemetry.mlflow.experiment", "telemetry.wandb.project", "telemetry.wandb.entity", "checkpoints.best",
    "data.chat_template_kwargs.*", "rollout.bad_words", "rollout.stop",
}  # fmt: skip
"""Names that are sent to a service, whatever they are; a metric; words of prompts and responses."""
ATTACKS = (
    "/etc/passwd", "../../etc/passwd", "away/passwd", "file:///etc/passwd", "unix:///run/redis.sock", "os:system",
    "/tmp/evil.py:f", "../evil.py:f", "away/evil.py:f", "dir:///tmp", "subprocess:run", "http:/evil.py:f",
    "tiered+s3://b/p?endpoint=http://s3&redis=unix:///run/redis.sock", "s3://b/p?endpoint=file:///etc",
)  # fmt: skip


def keys_of(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """The keys that can hold text, from the annotations (the code under test reads the JSON schema)."""
    for name, field in model.model_fields.items():
        yield from _keys(field.annotation, f"{above}{name}")


def _keys(annotation: Any, key: str) -> Iterator[str]:
    if annotation is str:
        yield key
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from keys_of(annotation, f"{key}.")
    elif get_origin(annotation) in (dict, Mapping):
        value = get_args(annotation)[1]
        yield from [f"{key}.*"] if value is Any else _keys(value, f"{key}.*")
    elif get_origin(annotation) is not None and not str(annotation).startswith("typing.Literal"):
        for inner in get_args(annotation):
            yield from _keys(inner, key)


def test_every_key_that_holds_text_has_a_rule_and_every_rule_a_key() -> None:
    assert text_keys() == set(keys_of(JobConfig))
    listed = {key for key in text_keys() if key in RULES}
    below = {key for key in text_keys() if any(key.startswith(rule[:-1]) for rule in RULES if rule.endswith(".*"))}
    assert listed | below == text_keys()
    tables = {rule for rule in RULES if rule.endswith(".*") and any(key.startswith(rule[:-1]) for key in text_keys())}
    inner = {"algorithm.advantage", "algorithm.loss", "platform.kind"}
    assert set(RULES) == listed | tables | inner
    assert rule_of("name.that.is.new") is None, "no key of a job: said so when it is parsed"


def with_value(key: str, value: str) -> dict[str, Any]:
    """A job over HTTP whose `key` is `value`; `*` is any name."""
    table: dict[str, Any] = {"name": "j", "steps": 1, "model": {"path": "model"}, "data": {"train": "train.jsonl"}}
    holder = table
    *sections, last = ["x" if part == "*" else part for part in key.split(".")]
    for section in sections:
        holder = holder.setdefault(section, {})
    holder[last] = value
    return table | ({"reward": {"model": value, "score": "model"}} if key == "reward.model" else {})


def read(table: Mapping[str, Any], root: Path, defaults: Mapping[str, Any] | None = None) -> JobConfig:
    return read_job(json.dumps(table).encode(), JSON_TYPE, roots=[root.resolve()], defaults=defaults or {})


def refusals(table: Mapping[str, Any], root: Path, defaults: Mapping[str, Any] | None = None) -> list[str]:
    try:
        read(table, root, defaults)
    except ApiError as error:
        return list(error.errors)
    return []


@pytest.mark.parametrize(
    "key", sorted(set(keys_of(JobConfig)) - OPENS_NOTHING | {"algorithm.loss", "algorithm.advantage"})
)
def test_what_lies_outside_is_refused_at_every_key(key: str, root: Path) -> None:
    """Or it has become a path inside: `file:///etc` is a folder `file:` as well."""
    for attack in ATTACKS:
        table = with_value(key, attack)
        lines = refusals(table, root)
        named = "platform.knative" if key.startswith("platform.knative") else key.replace("*", "x")
        if not any(line.startswith(f"{named}: ") for line in lines):
            assert lines == [], attack
            found: Any = read(table, root)
            for part in key.split("."):
                found = found["x" if part == "*" else part] if isinstance(found, Mapping) else getattr(found, part)
            assert Path(found.removesuffix(":f")).resolve().is_relative_to(root.resolve()), attack


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("recipe", "own.py:mine"), ("algorithm.loss", "own.py:loss"), ("algorithm.advantage", "sub/own.py:mine"),
        ("reward.score", "reward.py:score"), ("reward.score", "rule:gsm8k"), ("reward.score", "https://scorer/v1?a=b"),
        ("exchange.url", "redis://store:6379/0"), ("exchange.url", "tiered+s3://b/p?redis=rediss://store:6379/0"),
        ("exchange.url", "s3://b/p?endpoint=http://s3:9000&region=eu"), ("telemetry.otlp_endpoint", "http://c:4318"),
        ("telemetry.mlflow.tracking_uri", "https://mlflow"), ("telemetry.mlflow.experiment", "/Shared/rlhf"),
        ("algorithm.aggregation", "seq-mean-token-mean"), ("data.validation", "train.jsonl"),
    ],
)  # fmt: skip
def test_what_jobs_do_name_may_pass(key: str, value: str, root: Path) -> None:
    assert refusals(with_value(key, value), root) == []


@pytest.mark.parametrize(
    ("url", "strange"),
    [
        ("redis://redis:6379/1", None),
        ("s3://theirs/p?endpoint=http://S3:9000", None),
        ("redis://mine:6379/0", "mine:6379"),
        ("redis://redis:6379@mine/0", "mine"),
        ("redis://redis:6380/0", "redis:6380"),
        ("s3://b/p", "aws"),
        ("s3://b/p?endpoint=https://mine", "mine"),
        ("tiered+s3://b/p?endpoint=http://s3:9000&redis=redis://mine/0", "mine"),
    ],
)
def test_a_job_sends_the_stores_credentials_to_no_stranger(url: str, strange: str | None, root: Path) -> None:
    own = {"exchange": {"url": "tiered+s3://b/p?endpoint=http://s3:9000&redis=redis://redis:6379/0"}}
    lines = refusals(with_value("exchange.url", url), root, own)
    known = "which is no host of this server's own exchange (redis:6379, s3:9000)"
    assert lines == ([] if strange is None else [f"exchange.url: {url!r} names {strange}, {known}"])


def test_an_id_of_the_hub_is_taken_from_the_servers_cache_alone(root: Path) -> None:
    """A local path of that name wins; what is not in the cache is not fetched for a request."""
    (root / "acme" / "here").mkdir(parents=True)
    assert read(with_value("model.path", "acme/here"), root).model.path == str(root.resolve() / "acme" / "here")
    for key, get in (("model.path", "hf download acme/none"), ("data.train", "hf download acme/none --repo-type")):
        (line,) = refusals(with_value(key, "acme/none"), root)
        assert line.startswith(
            f"{key}: acme/none is not in the cache here, and nothing is downloaded for a job over HTTP"
        )
        assert get in line


def test_the_servers_own_word_is_not_asked_and_cannot_be_taken_back(root: Path) -> None:
    knative = {"image": "i", "env": {"A": "/b"}, "env_secrets": ["s"], "volumes": [{"name": "v", "mount_path": "/v"}]}
    defaults = {"platform": {"kind": "knative", "knative": knative}, "exchange": {"url": "dir:///shared"},
                "reward": {"score": "company.rewards:score"}}  # fmt: skip
    table = with_value("name", "j")
    assert refusals(table, root, defaults) == []
    assert refusals(table | {"platform": {"kind": "knative"}}, root, defaults) == []
    assert refusals(table | {"exchange": {"url": "dir:///shared"}}, root, defaults) == []
    changes: list[dict[str, Any]] = [
        {"kind": "local"}, {"knative": {"volumes": []}}, {"knative": {"env": {"A": "c"}}},
        {"knative": {"run_as_user": 0}}, {"knative": {"env": {"B": "/b"}}},
    ]  # fmt: skip
    for change in changes:
        lines = refusals(table | {"platform": change}, root, defaults)
        assert lines == [
            f"platform.{next(iter(change))}: is set by the server's defaults, not by a job that comes over HTTP"
        ]
    assert rule_of("platform.knative") is server


def test_links_that_lead_to_each_other(root: Path) -> None:
    for one, two in (("ring", "gnir"), ("gnir", "ring")):
        (root / one).symlink_to(root / two)
    assert refusals(with_value("data.train", "ring/x"), root)[0].startswith("data.train: ")
