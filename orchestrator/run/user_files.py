"""The user's own code, on its way to functions that do not see the user's disk (docs/knative.md).

`file.py:name` in `reward.score`, `environment.kind`, `algorithm.advantage`, `algorithm.loss` becomes
`exchange:files/<sha>/file.py:name`: the file goes into the job's exchange, and a replica takes it from there
(functions/call/userfile.py). Models travel as versions, prompts with their calls: nothing else of a job is read from a
disk by functions.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from functions.call.train_params import TrainParams
from functions.call.userfile import CARRIED
from orchestrator.base.errors import ConfigError
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.job.config import JobConfig
from orchestrator.job.environment_config import SCHEMES

FILES = "files/"


async def carry(
    store: AsyncExchange, job: JobConfig, settings: Mapping[str, TrainParams]
) -> tuple[JobConfig, dict[str, TrainParams]]:
    """The job and its train settings as functions elsewhere understand them. Raises ConfigError for a file that is not
    there."""
    scorers = [await _carried(store, "reward.score", scorer) for scorer in job.reward.scorers.values()]
    score = scorers[0] if isinstance(job.reward.score, str) else tuple(scorers)
    told = {
        model: replace(
            params,
            advantage=await _carried(store, "algorithm.advantage", params.advantage),
            loss=await _carried(store, "algorithm.loss", params.loss),
        )
        for model, params in settings.items()
    }
    changed: dict[str, Any] = {"reward": job.reward.model_copy(update={"score": score})}
    if job.environment is not None:
        kinds = {n: await _carried(store, "environment.kind", kind) for n, kind in job.environment.kinds.items()}
        changed["environment"] = job.environment.model_copy(update={"kind": kinds})
    return job.model_copy(update=changed), told


async def _carried(store: AsyncExchange, key: str, name: str) -> str:
    where, _, attribute = name.rpartition(":")
    if not where.endswith(".py") or "://" in name or name.startswith(SCHEMES):
        return name
    path = Path(where)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}") from error
    place = f"{FILES}{hashlib.sha256(data).hexdigest()[:16]}/{path.name}"
    await store.durable.put(place, data)
    return f"{CARRIED}{place}:{attribute}"
