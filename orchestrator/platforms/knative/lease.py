"""The dead man's switch: what lets functions go to zero when nobody is left to do it.

    orchestrator --every renew_s: activeDeadlineSeconds += ...--> Lease (a Job that never starts)
                 x dies
    Kubernetes   deadline passes -> Job failed -> deleted (ttlSecondsAfterFinished: 0)
                 -> garbage collection: Services, Revisions, pods

Only controllers that every Kubernetes has take part; nothing of ours has to be alive
(docs/decisions/0006-knative-lease.md). The lease is short where renewals come on time, since pods drain for 31 s more,
and as long as three of them take where they do not: a busy machine, an API that comes and goes.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

from orchestrator.platforms.knative import manifests
from orchestrator.platforms.knative.api import ApiError, Json, KubeApi, batch

RECENT = 30
TRIES = 3


class LeaseLost(Exception):
    """The lease ran out while we lived: what it owned is gone, or going."""


class Lease:
    """Taken once, for `most_s`. Time runs by our monotonic clock from before the Job was made: no other is trusted."""

    def __init__(
        self, api: KubeApi, context: manifests.JobContext, most_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api, self._context, self._most_s, self._clock = api, context, most_s, clock
        self._begun_s = self._renewed_s = 0.0
        self._gaps_s = deque[float](maxlen=RECENT)
        self.job: Json = {}

    async def take(self) -> None:
        """Raises ApiError."""
        self._begun_s = self._renewed_s = self._clock()
        body = manifests.lease(self._context, math.ceil(self._most_s))
        self.job = await asyncio.to_thread(self._api.create, batch(self._context.config.namespace, "jobs"), body)

    async def renew(self) -> None:
        """Lives on from now, for three times the longest of the recent gaps between renewals, `most_s` at most.

        Raises LeaseLost, and ApiError when the API does not answer: try again.
        """
        now_s = self._clock()
        self._gaps_s.append(now_s - self._renewed_s)
        deadline_s = math.ceil(now_s - self._begun_s + min(self._most_s, TRIES * max(self._gaps_s)))
        try:
            job = await asyncio.to_thread(self._api.merge, self._path, {"spec": {"activeDeadlineSeconds": deadline_s}})
        except ApiError as error:
            if error.status in (404, 409, 422):
                raise LeaseLost(f"lease {self._path}: {error.message}") from error
            self._gaps_s.pop()  # it is growing
            raise
        self._renewed_s = now_s
        ended = [c for c in job.get("status", {}).get("conditions", ()) if c["type"] in ("Failed", "FailureTarget")]
        if ended or "deletionTimestamp" in job["metadata"]:
            raise LeaseLost(f"lease {self._path} ran out")

    async def drop(self) -> None:
        await asyncio.to_thread(self._api.delete, self._path)

    @property
    def _path(self) -> str:
        return batch(self._context.config.namespace, "jobs", self.job["metadata"]["name"])
