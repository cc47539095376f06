"""Pods, as they come and go: the truth that the ledger and the scaler go by.

API --watch (a thread)--> Pods.apply (event loop): scheduled -> ready -> busy <-> idle -> draining -> gone
                                                   paid for from here ----------------------------> to here
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.base.background import in_one_line
from orchestrator.platforms.base import PlatformError, Replica, ReplicaState, Usage
from orchestrator.platforms.knative import manifests
from orchestrator.platforms.knative.api import ApiError, Json, KubeApi, core
from orchestrator.platforms.knative.reasons import Reason, why_not

WATCH_S = 30.0
"""A watch is begun anew, with a list, so often."""
AGAIN_S = 0.5


@dataclass(eq=False)
class Pod:
    """One replica. Times are the event loop's."""

    function: str
    name: str
    seen_s: float
    started_s: float | None = None
    """Scheduled to a node: paid for from here."""
    stopped_s: float | None = None
    state: ReplicaState = "starting"
    since_s: float = 0.0
    ready_s: float | None = None
    """First ready: its function is active since then, as Knative sees it."""
    draining_s: float | None = None
    busy_s: float = 0.0
    busy_since_s: float | None = None
    aside: bool = False
    """Taken out of its ReplicaSet: it will be deleted, whatever the watch says until then."""
    deleted: bool = False
    reason: Reason | None = None
    reason_since_s: float = 0.0
    restarts: int = 0

    @property
    def live(self) -> bool:
        return self.stopped_s is None and self.state != "draining"

    @property
    def free(self) -> bool:
        """No call of ours is open on it."""
        return self.busy_since_s is None

    def enter(self, state: ReplicaState, now_s: float) -> None:
        if state != self.state:
            self.state, self.since_s = state, now_s
            if state == "draining":
                self.draining_s = now_s
            elif state != "starting" and self.ready_s is None:
                self.ready_s = now_s


class Pods:
    """All pods of a job since it was deployed. `changed` hears the function whose pods have changed."""

    def __init__(self, clock: Callable[[], float], changed: Callable[[str], None]) -> None:
        self._clock, self._changed = clock, changed
        self._pods: dict[str, Pod] = {}

    def apply(self, kind: str, value: Json) -> None:
        """One watch event; kind SYNC has the whole list."""
        if kind == "SYNC":
            names = {item["metadata"]["name"] for item in value["items"]}
            for item in value["items"]:
                self._seen(item)
            for pod in [p for p in self._pods.values() if p.stopped_s is None and p.name not in names]:
                self._gone(pod)
        elif kind == "DELETED":
            if (known := self._pods.get(value["metadata"]["name"])) is not None:
                self._gone(known)
        elif kind in ("ADDED", "MODIFIED"):
            self._seen(value)

    def _seen(self, value: Json) -> None:
        meta, now_s = value["metadata"], self._clock()
        function = meta["labels"][manifests.FUNCTION_LABEL]
        pod = self._pods.setdefault(meta["name"], Pod(function, meta["name"], now_s, since_s=now_s))
        if value.get("status", {}).get("phase") in ("Succeeded", "Failed"):  # evicted: its node is free of it
            self._gone(pod)
            return
        if pod.started_s is None and value.get("spec", {}).get("nodeName"):
            pod.started_s = now_s
        statuses = value.get("status", {}).get("containerStatuses", ())
        pod.restarts = max((status["restartCount"] for status in statuses), default=0)
        reason = why_not(value)
        if reason is None or pod.reason is None or reason.kind != pod.reason.kind:
            pod.reason_since_s = now_s
        pod.reason = reason
        pod.deleted |= "deletionTimestamp" in meta
        if pod.deleted or pod.aside:
            pod.enter("draining", now_s)
        elif any(c["type"] == "Ready" and c["status"] == "True" for c in value["status"].get("conditions", ())):
            pod.enter("idle" if pod.free else "busy", now_s)
        elif pod.free:
            pod.enter("starting", now_s)
        self._changed(function)

    def _gone(self, pod: Pod) -> None:
        now_s = self._clock()
        if pod.stopped_s is None:
            self.release(pod.name)
            pod.stopped_s = now_s
            pod.enter("draining", now_s)
            self._changed(pod.function)

    def take(self, function: str, name: str) -> None:
        """A call has begun on a pod, which the watch may not have shown yet."""
        now_s = self._clock()
        pod = self._pods.setdefault(name, Pod(function, name, now_s, started_s=now_s, since_s=now_s))
        pod.busy_since_s = now_s
        if pod.live:
            pod.enter("busy", now_s)

    def release(self, name: str) -> None:
        """Its call is over."""
        now_s = self._clock()
        pod = self._pods[name]
        if pod.busy_since_s is not None:
            pod.busy_s += now_s - pod.busy_since_s
            pod.busy_since_s = None
            if pod.live:
                pod.enter("idle", now_s)

    def draining(self, name: str, *, aside: bool = False) -> None:
        """We delete it now, the watch will say so soon; or set it aside first."""
        pod = self._pods[name]
        pod.aside |= aside
        pod.enter("draining", self._clock())

    def undeleted(self) -> list[str]:
        """Pods that exist and nobody has deleted yet; whoever asks does so now."""
        found = [pod for pod in self._pods.values() if pod.stopped_s is None and not pod.deleted]
        for pod in found:
            pod.deleted = True
            pod.enter("draining", self._clock())
        return [pod.name for pod in found]

    def of(self, function: str) -> list[Pod]:
        """Those that exist."""
        return [pod for pod in self._pods.values() if pod.function == function and pod.stopped_s is None]

    def named(self, name: str) -> Pod | None:
        return self._pods.get(name)

    def replicas(self) -> list[Replica]:
        return [Replica(p.function, p.name, p.state, p.since_s) for p in self._pods.values() if p.stopped_s is None]

    def usage(self) -> list[Usage]:
        now_s = self._clock()
        lives = sorted((p for p in self._pods.values() if p.started_s is not None), key=lambda p: p.started_s or 0.0)
        return [
            Usage(
                pod.function,
                pod.name,
                pod.started_s or 0.0,
                pod.stopped_s,
                pod.busy_s + (0.0 if pod.busy_since_s is None else now_s - pod.busy_since_s),
                pod.ready_s,
                pod.draining_s,
            )
            for pod in lives
        ]


class PodWatch:
    """Feeds `Pods` from a thread of its own until `stop`; what the thread dies of is raised in `supervise`."""

    def __init__(self, api: KubeApi, namespace: str, job: str, apply: Callable[[str, Json], None]) -> None:
        self._api = api
        self._path = core(namespace, "pods")
        self._query = {"labelSelector": manifests.selector(job)}
        self._apply = apply
        self._loop = asyncio.get_running_loop()
        self._stopped = threading.Event()
        self.synced = asyncio.Event()
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="knative-pods", daemon=True)
        self._thread.start()

    async def ready(self) -> None:
        """Returns when the pods are known. Raises what the watch has failed with before that."""
        synced = asyncio.create_task(self.synced.wait())
        try:
            await asyncio.wait((synced, self._failed), return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
        finally:
            synced.cancel()

    async def supervise(self) -> None:
        """Endless. Raises what the watch has failed with: nobody sees pods come and go any more."""
        await asyncio.shield(self._failed)

    def stop(self) -> None:
        """No more events. The thread ends with its watch."""
        self._stopped.set()

    def _run(self) -> None:
        try:
            self._follow()
        except Exception as error:
            self._post(self._fail, error)

    def _follow(self) -> None:
        while not self._stopped.is_set():
            try:
                listed = self._api.get(self._path, **self._query)
                self._send("SYNC", listed)
                query = self._query | {"resourceVersion": listed["metadata"]["resourceVersion"]}
                for event in self._api.watch(self._path, query, WATCH_S):
                    if event["type"] == "ERROR":
                        break
                    self._send(event["type"], event["object"])
            except ApiError:
                self._stopped.wait(AGAIN_S)

    def _send(self, kind: str, value: Json) -> None:
        if not self._stopped.is_set():
            self._post(self._receive, kind, value)

    def _post(self, action: Callable[..., None], *values: object) -> None:
        try:
            self._loop.call_soon_threadsafe(action, *values)
        except RuntimeError:  # the loop has closed: so has the platform
            self._stopped.set()

    def _receive(self, kind: str, value: Json) -> None:
        if self._stopped.is_set():
            return
        try:
            self._apply(kind, value)
        except Exception as error:
            self._fail(error)
        self.synced.set()

    def _fail(self, error: Exception) -> None:
        self._stopped.set()
        if not self._failed.done():
            self._failed.set_exception(PlatformError(f"the watch over the job's pods has ended: {in_one_line(error)}"))
