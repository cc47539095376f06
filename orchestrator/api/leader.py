"""Which of several servers starts jobs: the holder of a Lease (coordination.k8s.io/v1), as client-go's leader election.

    holder --every RENEW_S: renewTime--> Lease         lets it go at its end
    others --every RENEW_S: who, since when?           take it when it was let go, or not renewed for LEASE_S

Time runs by our own monotonic clock from when a renewal was seen: no other is trusted. The object is there already (the
chart's): who may patch this one and create none cannot take another's.
"""

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime

from orchestrator.api.launch import Alone
from orchestrator.platforms.knative.api import ApiError, Json, KubeApi, coordination

LEASE_S, RENEW_S = 15, 2.0
LEADS_S = 10.0
"""After its last renewal a holder leads for so long: less than the others wait."""
log = logging.getLogger(__name__)


class Leader(Alone):
    """Not thread-safe, but for the question whether it leads."""

    def __init__(
        self, api: KubeApi, namespace: str, name: str, me: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api, self._path, self._me, self._clock = api, coordination(namespace, "leases", name), me, clock
        self._seen: tuple[str, str] = ("", "")
        self._seen_s = self._looked_s = self._until_s = float("-inf")

    def __call__(self) -> bool:
        return self._clock() < self._until_s

    def look(self) -> None:
        now_s = self._clock()
        if now_s < self._looked_s + RENEW_S:
            return
        self._looked_s = now_s
        try:
            lease = self._api.get(self._path)
            spec = lease.get("spec") or {}
            seen = (spec.get("holderIdentity") or "", spec.get("renewTime") or "")
            if seen != self._seen:
                self._seen, self._seen_s = seen, now_s
            if seen[0] not in ("", self._me) and now_s < self._seen_s + LEASE_S:
                self._until_s = float("-inf")
                return
            self._write(lease, self._me)
            if not self():
                log.warning("this server leads: it starts jobs from here on")
            self._until_s = now_s + LEADS_S
        except ApiError as error:
            log.log(logging.INFO if error.status == 409 else logging.ERROR, "lease %s: %s", self._path, error)

    def let_go(self) -> None:
        if self():
            self._until_s = float("-inf")
            try:
                self._write(self._api.get(self._path), "")
            except ApiError as error:
                log.warning("lease %s is left to run out: %s", self._path, error)

    def _write(self, lease: Json, holder: str) -> None:
        """409 where another was faster."""
        spec = {"holderIdentity": holder, "leaseDurationSeconds": LEASE_S,
                "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")}  # fmt: skip
        version = {"resourceVersion": lease["metadata"]["resourceVersion"]}
        self._api.merge(self._path, {"metadata": version, "spec": spec})
