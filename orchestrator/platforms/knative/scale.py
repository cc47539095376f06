"""One function's replicas: how many are wanted, and how that is made so without a new Revision.

raise   min-scale on the Revision -> a wake-up request (min-scale alone does nothing on a Revision never yet active)
lower   busy pods are made dear, no new ones can start -> idle pods are set aside (out of their ReplicaSet), min-scale
        and Deployment lowered -> deleted with a short grace: a pod that Knative removes itself lives 31 s more
zero    min-scale -> Knative marks the function inactive, and leaves its last pods alone for the retention period
        -> set aside, Deployment lowered, deleted. Not before no request has *arrived* and the function has been active
        for `quiet_s`: until then the autoscaler wants one replica whatever min-scale says, and a pod that is deleted
        all the same makes the revision "activating": its successor has to be ready, and active for the whole window,
        before zero is possible again (docs/decisions/0005-knative-scale.md)
"""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from orchestrator.base.clock import now_s
from orchestrator.platforms.base import FunctionSpec
from orchestrator.platforms.knative import manifests
from orchestrator.platforms.knative.api import ApiError, Json, KubeApi, apps, autoscaling, core, serving
from orchestrator.platforms.knative.watch import Pod, Pods
from orchestrator.platforms.queue import FunctionQueue

GRACE_S = 1
DEAR = "1000"
AGAIN_S = 1.0
WAKE_S = 30.0
LOOK_S = 0.05
ROUTES_S = 0.2
"""Until no activator sends a request to a pod that was deleted."""


@dataclass(frozen=True)
class Timing:
    """What the platform waits for. The defaults are for Knative 1.21 to 1.23 with a window of 6 s."""

    quiet_s: float = 6.0
    """After a request has arrived, or the first pod was ready: the window. Knative marks the function inactive at its
    autoscaler's next tick (2 s), or the one after."""
    lease_s: float = 20.0
    """At most; three times `renew_s` where renewals come on time."""
    renew_s: float = 2.0
    close_s: float = 10.0
    """How long `close` waits for the last pods."""
    ready_s: float = 120.0
    """How long a new Service may take to be ready at zero."""
    inactive_s: float = 5.0
    """How long Knative may take to mark a function inactive, before it is asked again."""
    lowered_s: float = 0.3
    """How long its controllers take at least to see a Deployment's new scale."""
    pending_s: float = 300.0
    """How long a function may be without any replica for a reason that may pass."""
    lost_s: float = 15.0
    """How long a replica that was ready may be ready no more, before another takes its place: it is cut off, or stuck.
    Knative keeps it, and requests wait for it."""
    failed_starts: int = 3
    astray_s: float = 10.0
    """How long a request may wait while a replica is idle. An activator that pods have answered too late, on a busy
    cluster, sends requests to the Service's address: one may come to a busy replica, and waits there for its end."""


class Function(FunctionQueue[Literal[True]]):
    """A deployed function, and the wishes it has to meet. Which replica a call comes to Knative decides: a place is the
    right to have one call more open, as many as replicas are wanted.
    """

    def __init__(self, spec: FunctionSpec, revision: str, address: str, applied: int) -> None:
        super().__init__(spec)
        self.revision = revision
        self.address = address
        """URL of its Service."""
        self.applied = applied
        """min-scale as the cluster has it."""
        self.calling = 0
        """Attempts that have a place,"""
        self.unplaced = 0
        """and those of them that no replica has answered yet."""
        self.last_request_s = float("-inf")
        self.lowering = False
        """Pods are being let go: no call is sent, it could come to one of them."""
        self.failed = asyncio.Event()
        self.changed = asyncio.Event()

    def free(self) -> Literal[True] | None:
        if self.calling >= self.wanted or self.lowering:
            return None
        self.calling += 1
        return True

    def release(self, place: Literal[True] = True) -> None:
        self.calling -= 1
        self.hand_out()
        self.changed.set()

    def want(self, replicas: int) -> None:
        super().want(replicas)
        if not self.failure:
            self.failed.clear()
        self.hand_out()
        self.changed.set()

    def fail(self, message: str) -> None:
        self.failure = message
        self.failed.set()
        self.hand_out()


class Scaler:
    """Brings one function's replicas in line with what is wanted, for as long as it runs."""

    def __init__(
        self, api: KubeApi, context: manifests.JobContext, function: Function, pods: Pods, timing: Timing,
        wake: Callable[[Function, float], Awaitable[bool]], owner: Callable[[], Json],
    ) -> None:  # fmt: skip
        self._api, self._namespace, self._timing = api, context.config.namespace, timing
        self._capacity_s = context.capacity_s
        self._secret = core(self._namespace, "secrets", context.secret)
        self._function, self._pods, self._wake = function, pods, wake
        self._owner = owner
        """The lease Job that pods belong to which no ReplicaSet has any more."""
        self._waking: asyncio.Task[None] | None = None
        self._aside: set[Pod] = set()
        self._gated = False
        """No pod of the function can start."""

    async def run(self) -> None:
        """Endless; ends by cancellation."""
        function = self._function
        try:
            while True:
                wait_s = await self._settle()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await function.changed.wait()
                function.changed.clear()
        finally:
            if self._waking is not None:
                self._waking.cancel()

    async def _settle(self) -> float | None:
        """One look; returns in how many seconds the next is due, if nothing happens before."""
        function = self._function
        lost, lost_s = self._lost()
        wait_s = min((s for s in (self._judge(), lost_s) if s is not None), default=None)
        target = max(function.wanted, function.calling)
        held_s = self._held_s() if target == 0 else 0.0
        try:
            await self._gate(up=True)
            await self._delete([*self._aside, *lost])
            if held_s == math.inf:  # should it never start, Knative gives it up sooner by itself
                if function.applied:
                    await self._patch(0)
                return None
            if held_s > 0:
                target, wait_s = 1, held_s
            if target > function.applied:
                await self._patch(target)
            elif target < function.applied or self._surplus(target):
                if function.unplaced and any(pod.live for pod in self._pods.of(function.spec.name)):
                    return wait_s  # a pod that looks idle may just be getting this call
                function.lowering = True
                try:
                    if not await self._lower(target):
                        return AGAIN_S
                    await asyncio.sleep(ROUTES_S)
                finally:
                    function.lowering = False
                    function.hand_out()
        except ApiError as error:
            if error.status in (400, 403):
                function.fail(f"scaling {function.spec.name} was refused: {error.message}")
            return AGAIN_S
        running = any(pod.state in ("idle", "busy") for pod in self._live())
        if function.wanted > 0 and not running and not function.unplaced:  # a call that waits is a request as well
            self._start_waking()
        return wait_s

    def _held_s(self) -> float:
        """For how long Knative would put back a pod that we delete; inf: for as long as no pod has been ready."""
        live = self._live()
        if not live and not self._function.applied:
            return 0.0
        ready_s = [pod.ready_s for pod in live if pod.ready_s is not None]
        if live and not ready_s:
            return math.inf
        since_s = max(self._function.last_request_s, min(ready_s, default=-math.inf))
        return since_s + self._timing.quiet_s - now_s()

    def _live(self) -> list[Pod]:
        return [pod for pod in self._pods.of(self._function.spec.name) if pod.live]

    def _lost(self) -> tuple[list[Pod], float | None]:
        """Replicas that are ready no more, and no call of ours is on, whose time is over; when that of the next is."""
        pods = [p for p in self._live() if p.state == "starting" and p.ready_s is not None and p.reason is None]
        left_s = {pod: pod.since_s + self._timing.lost_s - now_s() for pod in pods}
        return [pod for pod in pods if left_s[pod] <= 0], min((s for s in left_s.values() if s > 0), default=None)

    async def _patch(self, minimum: int) -> None:
        """Of the Revision, where it stays; then of its PodAutoscaler, which would get it 0.1 s later.

        Knative before 1.21 reads the latter only; later ones put it in line with the Revision, as they have seen it.
        """
        revision, bounds = self._function.revision, manifests.bounds(minimum)
        await asyncio.to_thread(self._api.merge, serving(self._namespace, "revisions", revision), bounds)
        with contextlib.suppress(ApiError):
            own = autoscaling(self._namespace, "podautoscalers", revision)
            await asyncio.to_thread(self._api.merge, own, bounds)
        self._function.applied = minimum

    def _surplus(self, target: int) -> list[Pod]:
        """Pods beyond those wanted that nothing runs on. They come where one was let go before Knative had seen it."""
        live = self._live()
        return [pod for pod in live if pod.state != "busy" and pod.free][: max(0, len(live) - target)]

    async def _lower(self, target: int) -> bool:
        """False: Knative has not marked the function inactive yet, or a replica is wanted again."""
        if target == 0:
            await self._patch(0)
            if not await self._inactive():
                return False
        live = self._live()
        victims = sorted(self._surplus(target), key=lambda pod: pod.state == "idle")
        if target and victims:
            await asyncio.gather(*(self._make_dear(pod) for pod in live if pod not in victims))
        await self._gate(up=False)
        await asyncio.gather(*(self._set_aside(pod) for pod in victims))
        if target:
            await self._patch(target)  # first: by the old min-scale the autoscaler would raise the Deployment again
        await self._shrink(target)
        await asyncio.gather(self._delete(list(self._aside)), self._settled(target))
        await self._gate(up=True)
        return True

    async def _gate(self, *, up: bool) -> None:
        """Whether pods of the function can start.

        Until its own scale is lowered the ReplicaSet replaces pods that were set aside, and then deletes what it has
        put there: a pod whose containers have begun to start drains for 31 s, one without this volume just goes.
        """
        if self._gated is up:
            await asyncio.to_thread(self._api.merge, self._secret, manifests.gates([self._function.spec.name], up=up))
            self._gated = not up

    async def _inactive(self) -> bool:
        """Whether Knative wants no replica either. From then on it leaves the Deployment's scale alone."""
        path = serving(self._namespace, "revisions", self._function.revision)
        until_s = now_s() + self._timing.inactive_s
        while now_s() < until_s and not self._function.wanted:
            status = (await asyncio.to_thread(self._api.get, path)).get("status", {})
            if any(c["type"] == "Active" and c["status"] == "False" for c in status.get("conditions", ())):
                return True
            await asyncio.sleep(LOOK_S)
        return False

    async def _shrink(self, target: int) -> None:
        """As Knative does when it has seen the new min-scale; until then pods set aside are replaced."""
        deployment = f"{self._function.revision}-deployment"
        path = apps(self._namespace, "deployments", deployment) + "/scale"
        with contextlib.suppress(ApiError):
            await asyncio.to_thread(self._api.merge, path, {"spec": {"replicas": target}})

    async def _set_aside(self, pod: Pod) -> None:
        """Now neither the ReplicaSet nor the autoscaler can be faster, or slower, with it than we are."""
        if not pod.free:
            return  # a call got there first
        self._pods.draining(pod.name, aside=True)
        self._aside.add(pod)
        with contextlib.suppress(ApiError):  # then the ReplicaSet has it: it may take a whole drain
            path = core(self._namespace, "pods", pod.name)
            await asyncio.to_thread(self._api.merge, path, manifests.set_aside(self._owner()), strategic=True)

    async def _settled(self, target: int) -> None:
        """Until the ReplicaSet has taken back what it put in the place of pods set aside."""
        begin_s = now_s()
        while (passed_s := now_s() - begin_s) < self._timing.inactive_s:
            await asyncio.sleep(LOOK_S)
            if passed_s >= self._timing.lowered_s and not any(p.state == "starting" for p in self._surplus(target)):
                return

    async def _delete(self, pods: Iterable[Pod]) -> None:
        async def delete(pod: Pod) -> None:
            self._pods.draining(pod.name)
            await asyncio.to_thread(self._api.delete, core(self._namespace, "pods", pod.name), grace_s=GRACE_S)
            pod.deleted = True
            self._aside.discard(pod)

        await asyncio.gather(*(delete(pod) for pod in pods))

    async def _make_dear(self, pod: Pod) -> None:
        patch = manifests.annotate({manifests.DELETION_COST: DEAR})
        try:
            await asyncio.to_thread(self._api.merge, core(self._namespace, "pods", pod.name), patch)
        except ApiError as error:
            if error.status != 404:
                raise

    def _start_waking(self) -> None:
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._keep_waking())

    async def _keep_waking(self) -> None:
        """Requests, one after the other, until one has been answered."""
        function = self._function
        while function.wanted > 0 and not function.failure:
            if await self._wake(function, WAKE_S):
                return
            await asyncio.sleep(AGAIN_S / 4)

    def _judge(self) -> float | None:
        """Gives the function up when none of its replicas can run; returns when to look again."""
        function = self._function
        live = self._live()
        if function.wanted == 0 or function.failure or any(pod.state in ("idle", "busy") for pod in live):
            return None
        due_s: list[float] = []
        for pod in live:
            if pod.reason is None:
                continue
            patience_s = self._timing.pending_s
            if pod.reason.capacity and self._capacity_s is not None:
                patience_s = self._capacity_s
            left_s = pod.reason_since_s + patience_s - now_s()
            restarts = pod.restarts >= self._timing.failed_starts
            if not pod.reason.patient or restarts or left_s <= 0:
                function.fail(f"replicas of {function.spec.name!r} do not start: {pod.reason.line}")
                return None
            due_s.append(left_s)
        return min(due_s, default=None)
