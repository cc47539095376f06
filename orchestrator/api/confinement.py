"""What a job that comes over HTTP may name: an allow-list over every key of a job that can hold text.

    path     in a data root, symbolic links followed, or an id of the Hub (its form is that of a path below the root,
             which wins; submission.py takes what ids name from the server's cache alone)
    code     a name that is known, or `<file.py>:<name>` in a data root
    score    code, `rule:<name>`, `model`, or a web address
    store    a remote exchange, no place on the server; where the server's own is remote, at its hosts alone: who is
             named here is sent the credentials of the stores
    web      http or https
    text     anything: it is a name, and opens nothing
    plain    text without `/`, `\\` and `:`
    number   no text at all
    server   only what the server's defaults say

A key without a rule is refused, whatever it holds; one whose values the schema lists needs none. What stands in the
server's own defaults is not asked.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from orchestrator.job.config import JobConfig
from orchestrator.job.environment_config import SCHEMES
from orchestrator.job.paths import CODE, PATHS

REMOTE_EXCHANGES = ("redis", "rediss", "s3", "tiered+s3")
INNER = {"redis": ("redis", "rediss"), "endpoint": ("http", "https")}
"""Kinds of the URLs in an exchange's options."""
FILE = re.compile(r"(?P<file>(?:(?!://).)+\.py):[A-Za-z_]\w*")
Rule = Callable[[str, Sequence[Path]], str | None]
"""A value, and the data roots -> why it may not be; None: it may. The key is put before it."""


def form(pattern: str, why: str) -> Rule:
    """The whole value has this form, whatever the roots."""
    return lambda value, _roots: None if re.fullmatch(pattern, value, re.DOTALL) else f"{value!r} {why}"


web = form(r"https?://.*", "is no web address (http:// or https://)")
text = form(r".*", "")
plain = form(r"[^/\\:]*", "is no name: it has one of / \\ :")
number = form(r"(?!)", "is text, where jobs of this server set numbers")


def path(value: str, roots: Sequence[Path]) -> str | None:
    try:
        found = (roots[0] / value).resolve()
    except (OSError, RuntimeError) as error:  # of links that lead to each other
        return f"{value!r} cannot be followed: {error}"
    if any(found.is_relative_to(root) for root in roots):
        return None
    return f"{str(found)!r} lies outside of {' or '.join(map(str, roots))}, where the data of jobs is"


def code(value: str, roots: Sequence[Path]) -> str | None:
    if found := FILE.fullmatch(value):
        return path(found["file"], roots)
    why = f"{value!r} is no code that jobs of this server may name (<file.py>:<name>)"
    return None if plain(value, roots) is None else why


def environment(value: str, roots: Sequence[Path]) -> str | None:
    if value.startswith(SCHEMES):
        return f"{value!r} is no environment that jobs of this server may name (<file.py>:<Class>)"
    return code(value, roots)


def score(value: str, roots: Sequence[Path]) -> str | None:
    if value.startswith(("http://", "https://")):
        return None
    return plain(value.removeprefix("rule:"), roots) if value.startswith("rule:") else code(value, roots)


def store(value: str, _roots: Sequence[Path]) -> str | None:
    listed = ", ".join(f"{kind}://" for kind in REMOTE_EXCHANGES)
    if value.partition("://")[0].lower() not in REMOTE_EXCHANGES:
        return f"{value!r} is no store that jobs of this server may name ({listed}); leave it out for its own"
    for name, inner in parse_qsl(urlsplit(value).query):
        kinds = INNER.get(name)
        if kinds is not None and urlsplit(inner).scheme not in kinds:
            listed = ", ".join(f"{kind}://" for kind in kinds)
            return f"{name}={inner!r} is no store that jobs of this server may name ({listed})"
    return None


def stranger(value: str, own: str) -> str | None:
    known = hosts(own)
    strange = sorted(hosts(value) - known)
    if not known or not strange:
        return None
    return f"{value!r} names {strange[0]}, which is no host of this server's own exchange ({', '.join(sorted(known))})"


def hosts(url: str) -> set[str]:
    """Whom an exchange's URL has connected to; of an S3 without an endpoint AWS."""
    parts = urlsplit(url)
    if parts.scheme.lower() not in REMOTE_EXCHANGES:
        return set()
    inner = dict(parse_qsl(parts.query))
    urls = [url] if parts.scheme.lower() in INNER["redis"] else [inner.get("endpoint", "//aws"), inner.get("redis", "")]
    return {urlsplit(one).netloc.rpartition("@")[2].lower() for one in urls} - {""}


def server(_value: str, _roots: Sequence[Path]) -> str | None:
    return "is set by the server's defaults, not by a job that comes over HTTP"


RULES: Mapping[str, Rule] = {
    **{".".join(key): path for key in PATHS},
    **{".".join(filter(None, key)): code for key in CODE},
    "reward.score": score,
    "environment.kind": environment,
    "environment.kind.*": environment,
    "reward.sandbox": web,
    "exchange.url": store,
    "telemetry.mlflow.tracking_uri": web,
    "telemetry.otlp_endpoint": web,
    "telemetry.mlflow.experiment": text,
    "telemetry.wandb.project": text,
    "telemetry.wandb.entity": text,
    "checkpoints.best": text,
    "data.chat_template_kwargs.*": text,
    "rollout.bad_words": text,
    "rollout.stop": text,
    "name": plain,
    "data.prompt_key": plain,
    "planner.gpu": plain,
    "algorithm.*": plain,
    "recipe_options.*": plain,
    "rollout.vllm.*": number,
    "platform.kind": server,
    "platform.knative.*": server,
}
"""By key; `algorithm.*` is all below `algorithm` that has no rule of its own."""


def refused(table: Mapping[str, Any], roots: Sequence[Path], defaults: Mapping[str, Any]) -> Iterator[str]:
    """A line for each key of a job, as it came, that names what it may not. Relative paths begin at the first root."""
    said = {"platform.kind": "local", "platform.knative": None} | dict(_leaves(defaults))
    for key, value in _leaves(table):
        rule = rule_of(key)
        if rule is None or said.get(key, ...) == value or not (isinstance(value, str) or rule is server):
            continue
        reason = rule(value, roots)
        if reason is None and rule is store:
            reason = stranger(value, str(said.get(key, "")))
        if reason is not None:
            yield f"{key if rule is not server or key in RULES else _above(key)}: {reason}"


def rule_of(key: str) -> Rule | None:
    """The rule of a job's key (`algorithm.kl.where`); None where the schema says all that it can be."""
    if key in RULES:
        return RULES[key]
    return RULES.get(f"{_above(key)}.*", server if key in text_keys() else None)


def _above(key: str) -> str:
    """The section with a rule for all below it that `key` stands in, else `key`."""
    parts = key.split(".")
    sections = (".".join(parts[:end]) for end in range(1, len(parts)))
    return next((section for section in sections if f"{section}.*" in RULES), key)


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(key, value) of all that is no table; lists by their items, an empty one as it is."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list) and value:
        for inner in value:
            yield from _leaves(inner, key)
    else:
        yield key, value


@cache
def text_keys() -> frozenset[str]:
    """The job's keys that can hold any text, from the schema; `section.*` where a section may have any keys."""
    schema = JobConfig.model_json_schema()

    def walk(part: Mapping[str, Any], key: str) -> Iterator[str]:
        if "$ref" in part:
            part = schema["$defs"][part["$ref"].rpartition("/")[2]]
        for choice in (*part.get("anyOf", ()), *([part["items"]] if "items" in part else ())):
            yield from walk(choice, key)
        for name, inner in part.get("properties", {}).items():
            yield from walk(inner, f"{key}.{name}" if key else name)
        more = part.get("additionalProperties")
        if isinstance(more, Mapping):
            yield from walk(more, f"{key}.*")
        elif more:
            yield f"{key}.*"
        if part.get("type") == "string" and "enum" not in part and "const" not in part:
            yield key

    return frozenset(walk(schema, ""))
