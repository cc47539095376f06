"""Pods, as they come and go: the truth that the ledger and the scaler go by.

API --watch (a thread)--> Pods.apply (event loop): scheduled -> ready -> busy <-> idle -> draining -> gone
                                                   paid for from here ----------------------------> to here
"""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from orchestrator.base.background import in_one_line
from orchestrator.base.clock import now_s
from orchestrator.platforms import queue
from orchestrator.platforms.base import PlatformError, Replica, Usage
from orchestrator.platforms.knative import manifests
from orchestrator.platforms.knative.api import ApiError, Json, KubeApi, core
from orchestrator.platforms.knative.reasons import Reason, why_not
from orchestrator.platforms.queue import Life

WATCH_S = 30.0
"""A watch is begun anew, with a list, so often."""
AGAIN_S = 0.5


@dataclass(eq=False)
class Pod(Life):
    """One replica, started when it is scheduled to a node. Knative sees its function active from `ready_s` on."""

    aside: bool = False
    """Taken out of its ReplicaSet: it will be deleted, whatever the watch says until then."""
    node: str = ""
    deleted: bool = False
    reason: Reason | None = None
    reason_since_s: float = 0.0
    restarts: int = 0

    @property
    def live(self) -> bool:
        return self.stopped_s is None and self.state != "draining"

    def replica(self) -> Replica:
        waits = self.reason.line if self.reason is not None and self.reason.capacity and self.live else ""
        return replace(super().replica(), waits=waits)


class Pods:
    """All pods of a job since it was deployed. `changed` hears the function whose pods have changed."""

    def __init__(self, changed: Callable[[str], None]) -> None:
        self._changed = changed
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
        meta = value["metadata"]
        function = meta["labels"][manifests.FUNCTION_LABEL]
        pod = self._pods.setdefault(meta["name"], Pod(function, meta["name"], now_s()))
        if value.get("status", {}).get("phase") in ("Succeeded", "Failed"):  # evicted: its node is free of it
            self._gone(pod)
            return
        pod.node = value.get("spec", {}).get("nodeName", "")
        if pod.started_s is None and pod.node:
            pod.started_s = now_s()
        statuses = value.get("status", {}).get("containerStatuses", ())
        pod.restarts = max((status["restartCount"] for status in statuses), default=0)
        reason = why_not(value)
        if reason is None or pod.reason is None or reason.kind != pod.reason.kind:
            pod.reason_since_s = now_s()
        pod.reason = reason
        pod.deleted |= "deletionTimestamp" in meta
        if pod.deleted or pod.aside:
            pod.enter("draining")
        elif any(c["type"] == "Ready" and c["status"] == "True" for c in value["status"].get("conditions", ())):
            pod.enter("idle" if pod.free else "busy")
        elif pod.free:
            pod.enter("starting")
        self._changed(function)

    def _gone(self, pod: Pod) -> None:
        if pod.stopped_s is None:
            pod.stop()
            self._changed(pod.function)

    def take(self, function: str, name: str) -> Pod:
        """A call has begun on a pod, which the watch may not have shown yet."""
        pod = self._pods.setdefault(name, Pod(function, name, now_s(), now_s()))
        pod.take()
        if pod.live:
            pod.enter("busy")
        return pod

    def release(self, name: str) -> None:
        """Its call is over."""
        pod = self._pods[name]
        if not pod.free:
            pod.release()
            if pod.live:
                pod.enter("idle")

    def draining(self, name: str, *, aside: bool = False) -> None:
        """We delete it now, the watch will say so soon; or set it aside first."""
        pod = self._pods[name]
        pod.aside |= aside
        pod.enter("draining")

    def undeleted(self) -> list[str]:
        """Pods that exist and nobody has deleted yet; whoever asks does so now."""
        found = [pod for pod in self._pods.values() if pod.stopped_s is None and not pod.deleted]
        for pod in found:
            pod.deleted = True
            pod.enter("draining")
        return [pod.name for pod in found]

    def of(self, function: str) -> list[Pod]:
        """Those that exist."""
        return [pod for pod in self._pods.values() if pod.function == function and pod.stopped_s is None]

    def named(self, name: str) -> Pod | None:
        return self._pods.get(name)

    def replicas(self) -> list[Replica]:
        return [pod.replica() for pod in self._pods.values() if pod.stopped_s is None]

    def usage(self) -> list[Usage]:
        return queue.usage(self._pods.values())


class PodWatch:
    """Feeds `Pods` from a thread of its own until `stop`; what the thread dies of is raised in `supervise`."""

    def __init__(self, api: KubeApi, context: manifests.JobContext, apply: Callable[[str, Json], None]) -> None:
        self._api = api
        self._path = core(context.config.namespace, "pods")
        self._query = {"labelSelector": manifests.selector(context)}
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
