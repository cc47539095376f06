"""The dead man's switch: what lets functions go to zero when nobody is left to do it.

    orchestrator --every renew_s: activeDeadlineSeconds += ...--> Lease (a Job that never starts)
                 x dies
    Kubernetes   deadline passes -> Job failed -> deleted (ttlSecondsAfterFinished: 0)
                 -> garbage collection: Services, Revisions, pods

Only controllers that every Kubernetes has take part; nothing of ours has to be alive
(docs/decisions/0006-knative-lease.md).
"""

from __future__ import annotations

import asyncio
import math
import time

from orchestrator.platforms.knative import manifests
from orchestrator.platforms.knative.api import ApiError, Json, KubeApi, batch


class LeaseLost(Exception):
    """The lease ran out while we lived: what it owned is gone, or going."""


class Lease:
    """Taken once. Time runs by our monotonic clock from before the Job was made: no other clock is trusted."""

    def __init__(self, api: KubeApi, context: manifests.JobContext, lease_s: float) -> None:
        self._api, self._context, self._lease_s = api, context, lease_s
        self._begun_s = 0.0
        self.job: Json = {}

    async def take(self) -> None:
        """Raises ApiError."""
        self._begun_s = time.monotonic()
        body = manifests.lease(self._context, math.ceil(self._lease_s))
        self.job = await asyncio.to_thread(self._api.create, batch(self._context.config.namespace, "jobs"), body)

    async def renew(self) -> None:
        """Lives `lease_s` from now. Raises LeaseLost, and ApiError when the API does not answer: try again."""
        deadline_s = math.ceil(time.monotonic() - self._begun_s + self._lease_s)
        try:
            job = await asyncio.to_thread(self._api.merge, self._path, {"spec": {"activeDeadlineSeconds": deadline_s}})
        except ApiError as error:
            if error.status in (404, 409, 422):
                raise LeaseLost(f"lease {self._path}: {error.message}") from error
            raise
        ended = [c for c in job.get("status", {}).get("conditions", ()) if c["type"] in ("Failed", "FailureTarget")]
        if ended or "deletionTimestamp" in job["metadata"]:
            raise LeaseLost(f"lease {self._path} ran out")

    async def drop(self) -> None:
        await asyncio.to_thread(self._api.delete, self._path)

    @property
    def _path(self) -> str:
        return batch(self._context.config.namespace, "jobs", self.job["metadata"]["name"])
