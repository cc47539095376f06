"""What the stand-in is made of: its constants, pods and revisions.

Seconds of the cluster pass `SPEED` times faster than ours, but for the lease's (`activeDeadlineSeconds` counts ours).
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.platforms.local_process import Process

Json = dict[str, Any]

SPEED = 20.0
AUTOSCALER_TICK_S = 2 / SPEED
READY_S = 1.2 / SPEED
ANNOTATION_S = 0.05
START_S = 0.25
"""These two race with requests, which do not pass faster: one to five, as measured (0.18 s, 0.85 s)."""
DRAIN_S = 31 / SPEED
SHORT_GRACE_S = 2.5 / SPEED
WINDOW_S = 6 / SPEED
QUEUE = "kueue.x-k8s.io/queue-name"
HASH = "pod-template-hash"
RETENTION = "autoscaling.knative.dev/scale-to-zero-pod-retention-period"
MIN, MAX, COST = (
    "autoscaling.knative.dev/min-scale",
    "autoscaling.knative.dev/max-scale",
    "controller.kubernetes.io/pod-deletion-cost",
)


class Refused(Exception):
    """An answer of the API other than 2xx."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


def merge(into: Json, patch: Json, *, strategic: bool = False) -> None:
    """RFC 7386; or Kubernetes' own, which adds owners to those that are there."""
    for key, value in patch.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict):
            merge(into.setdefault(key, {}), value, strategic=strategic)
        elif strategic and key == "ownerReferences":
            into[key] = [*into.get(key, ()), *copy.deepcopy(value)]
        else:
            into[key] = copy.deepcopy(value)


def conditions(ready: bool) -> list[Json]:
    return [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": str(ready)}]


def annotations_of(value: Json) -> Json:
    found: Json = value.get("metadata", {}).get("annotations") or {}
    return found


@dataclass(eq=False)
class Pod:
    value: Json
    revision: Revision
    path: Path
    process: Process | None = None
    ready: bool = False
    busy: bool = False
    removing: bool = False
    started: bool = False
    """Its volumes are there and its containers made: from now on it drains."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """It has drained."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        return str(self.value["metadata"]["name"])


@dataclass(eq=False)
class Revision:
    value: Json
    service: str
    template: Json
    active_before: bool = False
    """The autoscaler has data: since it last started, a request has come."""
    minimum: int = 0
    last_request_s: float = float("-inf")
    waiting: int = 0
    """Requests in the activator."""
    replicas: int = 0
    requests: int = 0
    active: str = "False"
    """The PodAutoscaler's condition; Unknown: activating."""
    active_since_s: float = 0.0
    inactive_since_s: float = float("-inf")
    pods: list[Pod] = field(default_factory=list)
    freed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        return str(self.value["metadata"]["name"])

    @property
    def retention_s(self) -> float:
        return float(annotations_of(self.template).get(RETENTION, "0s").removesuffix("s")) / SPEED

    @property
    def live(self) -> list[Pod]:
        return [pod for pod in self.pods if not pod.removing]

    @property
    def owned(self) -> list[Pod]:
        """Those of its ReplicaSet, which knows them by a label."""
        return [pod for pod in self.live if HASH in pod.value["metadata"]["labels"]]

    def settle(self, wish: int, now_s: float) -> int | None:
        """How many replicas the Deployment is to have, None: as it is. Zero has to be earned by a window of activity,
        and comes when the revision has been inactive for the retention period.

        knative/serving 1.23, pkg/reconciler/autoscaling/kpa: handleScaleToZero, computeActiveCondition.
        """
        ready = sum(pod.ready for pod in self.live)
        if wish == 0 and self.active == "True" and now_s - self.active_since_s < WINDOW_S:
            wish = 1
        if wish == 0 and self.active == "Unknown":
            if ready:
                self.active, self.active_since_s = "True", now_s
            return None  # as long as it is activating, for the whole progress deadline
        if wish == 0 and self.active == "False":
            return 0 if now_s - self.inactive_since_s >= self.retention_s else None
        before = self.active
        self.active = "False" if wish == 0 else "True" if ready >= max(1, self.minimum) else "Unknown"
        if before != "True" and self.active == "True":
            self.active_since_s = now_s
        if wish == 0:
            self.inactive_since_s = now_s
        self.value["status"] = {"conditions": [{"type": "Active", "status": self.active}]}
        return wish or None
