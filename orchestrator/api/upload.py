"""`rlhf-orchestrate submit --upload`: the files that a job names go to the server, and the job names them there."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from orchestrator.api.client import check
from orchestrator.base.errors import ConfigError, RunError
from orchestrator.job.environment_config import SCHEMES
from orchestrator.job.hub import HubId
from orchestrator.job.paths import CODE, PATHS

BLOCK = 1 << 20


def named_files(table: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, str, str, str]]:
    """What a job's table names: the table that holds a key, the key, its whole name, the path, `:<function>` or ""."""
    for section, key in (*PATHS, *CODE):
        holder = table if not section else table.get(section)
        value = holder.get(key) if isinstance(holder, dict) else None
        whole = f"{section}.{key}".lstrip(".")
        if isinstance(value, dict):  # environment.kind, several by name
            found = [(value, name, f"{whole}.{name}", kind) for name, kind in value.items()]
        else:
            found = [(holder, key, whole, value)] if isinstance(holder, dict) else []
        for inside, name, said, one in found:
            if not isinstance(one, str):
                continue
            file, suffix = one, ""
            if (section, key) in CODE:
                file, _, attribute = one.rpartition(":")
                if not file.endswith(".py") or "://" in one or one.startswith(SCHEMES):
                    continue
                suffix = f":{attribute}"
            yield inside, name, said, file, suffix


def name_absolutely(table: dict[str, Any], base: Path) -> None:
    """Makes absolute what `table` names and what is there, relative to `base`; the rest is left to the server."""
    for holder, key, _, file, suffix in named_files(table):
        if (base / file).exists():
            holder[key] = f"{(base / file).resolve()}{suffix}"


def send_files(client: httpx.Client, table: dict[str, Any], base: Path) -> None:
    """Sends what `table` names, and makes it name the server's copies. Raises ConfigError, Refused, RunError."""
    places: dict[str, Path] = {}
    named: list[tuple[dict[str, Any], str, str, str]] = []
    for holder, key, whole, file, suffix in named_files(table):
        source = base / file
        if not source.exists():
            if not suffix and HubId.parse(file) is not None:
                continue  # the server has it in its cache
            raise ConfigError(f"{whole}: {source}: no such file, nothing to upload")
        place = f"{whole.replace('.', '-') if '.' in whole else f'job-{whole}'}/{source.name}"
        places |= (
            {f"{place}/{p.relative_to(source)}": p for p in _files(source)} if source.is_dir() else {place: source}
        )
        named.append((holder, key, place, suffix))
    if not places:
        return
    bundle = _digest(places)
    directory = ""
    for place, source in places.items():
        try:
            answer = client.put(f"/v1/files/{bundle}", params={"path": place}, content=_blocks(source), timeout=600)
        except httpx.TransportError as error:
            raise RunError(f"{client.base_url}: {source} could not be sent ({error})") from error
        check(answer)
        directory = answer.json()["directory"]
    for holder, key, place, suffix in named:
        holder[key] = f"{directory}/{place}{suffix}"


def _files(directory: Path) -> list[Path]:
    return sorted(p for p in directory.rglob("*") if p.is_file() and not any(q.startswith(".") for q in p.parts[-1:]))


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            yield block


def _digest(places: dict[str, Path]) -> str:
    whole = hashlib.sha256()
    for place, source in sorted(places.items()):
        with source.open("rb") as file:
            whole.update(f"{place} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()[:16]
