"""The user's own code, on its way to functions that do not see the user's disk (docs/knative.md).

`file.py:name` in `reward.score`, `algorithm.advantage`, `algorithm.loss` becomes `exchange:files/<sha>/file.py:name`:
the file goes into the job's exchange, and a replica takes it from there (functions/call/userfile.py). Models travel as
versions, prompts with their calls: nothing else of a job is read from a disk by functions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from functions.base.wire import Json
from functions.call.userfile import CARRIED
from orchestrator.base.errors import ConfigError
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.job.config import JobConfig

FILES = "files/"


async def carry(store: AsyncExchange, job: JobConfig, settings: Mapping[str, object]) -> tuple[JobConfig, Json]:
    """The job and its train settings as functions elsewhere understand them. Raises ConfigError for a file that is not
    there."""
    score = await _carried(store, "reward.score", job.reward.score)
    own = {key: str(settings[key]) for key in ("advantage", "loss") if key in settings}
    told = {key: await _carried(store, f"algorithm.{key}", name) for key, name in own.items()}
    return job.model_copy(update={"reward": job.reward.model_copy(update={"score": score})}), {**settings, **told}


async def _carried(store: AsyncExchange, key: str, name: str) -> str:
    where, _, attribute = name.rpartition(":")
    if not where.endswith(".py") or "://" in name:
        return name
    path = Path(where)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}") from error
    place = f"{FILES}{hashlib.sha256(data).hexdigest()[:16]}/{path.name}"
    await store.durable.put(place, data)
    return f"{CARRIED}{place}:{attribute}"
