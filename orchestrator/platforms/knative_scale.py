"""One function's replicas: how many are wanted, and how that is made so without a new Revision.

raise   min-scale on the Revision -> a wake-up request (min-scale alone does nothing on a Revision never yet active)
lower   busy pods are made dear -> min-scale -> idle pods deleted with a short grace: a pod that Knative removes
        itself lives 31 s more, with its GPU
zero    as lower, when no request has *arrived* for `quiet_s`: until then the autoscaler wants one replica whatever
        min-scale says, and would only replace the deleted one
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from orchestrator.platforms import knative_manifests as manifests
from orchestrator.platforms.base import CallLost, FunctionSpec, PlatformError
from orchestrator.platforms.knative_api import ApiError, KubeApi, autoscaling, core, serving
from orchestrator.platforms.knative_watch import Pod, Pods

GRACE_S = 1
DEAR = "1000"
AGAIN_S = 1.0
WAKE_S = 30.0


@dataclass(frozen=True)
class Timing:
    """What the platform waits for. The defaults are for Knative 1.21 to 1.23 with a window of 6 s."""

    quiet_s: float = 8.0
    """After a request has arrived: the window, and one tick of the autoscaler (2 s)."""
    lease_s: float = 20.0
    renew_s: float = 4.0
    close_s: float = 10.0
    """How long `close` waits for the last pods."""
    ready_s: float = 120.0
    """How long a new Service may take to be ready at zero."""
    pending_s: float = 300.0
    """How long a function may be without any replica for a reason that may pass."""
    failed_starts: int = 3


@dataclass(eq=False)
class Function:
    """A deployed function, and the wishes it has to meet."""

    spec: FunctionSpec
    revision: str
    address: str
    """URL of its Service."""
    applied: int
    """min-scale as the cluster has it."""
    wanted: int = 0
    calling: int = 0
    """Attempts that have a slot,"""
    unplaced: int = 0
    """and those of them that no replica has answered yet."""
    last_request_s: float = float("-inf")
    failure: str = ""
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    waiters: deque[asyncio.Future[None]] = field(default_factory=deque)

    def fail(self, message: str) -> None:
        self.failure = message
        self.failed.set()
        self.hand_out()

    def hand_out(self) -> None:
        """Slots to those that wait for one, first come first served; as many as replicas are wanted."""
        while self.waiters and (self.failure or self.wanted == 0 or self.calling < self.wanted):
            waiter = self.waiters.popleft()
            if waiter.done():
                continue
            if self.failure:
                waiter.set_exception(PlatformError(self.failure))
            elif self.wanted == 0:
                waiter.set_exception(CallLost(f"no replica of {self.spec.name!r} is wanted any more"))
            else:
                self.calling += 1
                waiter.set_result(None)


class Scaler:
    """Brings one function's replicas in line with what is wanted, for as long as it runs."""

    def __init__(
        self, api: KubeApi, namespace: str, function: Function, pods: Pods, timing: Timing,
        wake: Callable[[Function, float], Awaitable[bool]],
    ) -> None:  # fmt: skip
        self._api, self._namespace, self._timing = api, namespace, timing
        self._function, self._pods, self._wake = function, pods, wake
        self._waking: asyncio.Task[None] | None = None

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
        wait_s = self._judge()
        target = max(function.wanted, function.calling)
        if target == 0 and function.applied > 0:
            quiet_s = function.last_request_s + self._timing.quiet_s - _now_s()
            if quiet_s > 0:
                target, wait_s = 1, quiet_s
        try:
            if target > function.applied:
                await self._patch(target)
            elif target < function.applied or self._surplus(target):
                if function.unplaced and any(pod.live for pod in self._pods.of(function.spec.name)):
                    return wait_s  # a pod that looks idle may just be getting this call
                await self._lower(target)
        except ApiError as error:
            if error.status in (400, 403):
                function.fail(f"scaling {function.spec.name} was refused: {error.message}")
            return AGAIN_S
        running = any(pod.state in ("idle", "busy") for pod in self._live())
        if function.wanted > 0 and not running and not function.unplaced:  # a call that waits is a request as well
            self._start_waking()
        return wait_s

    def _live(self) -> list[Pod]:
        return [pod for pod in self._pods.of(self._function.spec.name) if pod.live]

    async def _patch(self, minimum: int) -> None:
        revision = self._function.revision
        await asyncio.to_thread(
            self._api.merge, serving(self._namespace, "revisions", revision), manifests.bounds(minimum)
        )
        with contextlib.suppress(ApiError):  # Knative before 1.21 reads it here; later ones put their own value back
            await asyncio.to_thread(
                self._api.merge, autoscaling(self._namespace, "podautoscalers", revision), manifests.bounds(minimum)
            )
        self._function.applied = minimum

    def _surplus(self, target: int) -> list[Pod]:
        """Idle pods beyond those wanted. They come where a pod was deleted before min-scale had taken effect."""
        live = self._live()
        return [pod for pod in live if pod.state == "idle" and pod.free][: max(0, len(live) - target)]

    async def _lower(self, target: int) -> None:
        live = self._live()
        idle = [pod for pod in live if pod.free]
        victims = sorted(idle, key=lambda pod: pod.state == "idle")[: max(0, len(live) - target)]
        if target and victims:
            await asyncio.gather(*(self._make_dear(pod) for pod in live if pod not in victims))
        lower = [self._patch(target)] if target != self._function.applied else []
        await asyncio.gather(*lower, *(self._let_go(pod) for pod in victims))

    async def _make_dear(self, pod: Pod) -> None:
        patch = manifests.annotate({manifests.DELETION_COST: DEAR})
        try:
            await asyncio.to_thread(self._api.merge, core(self._namespace, "pods", pod.name), patch)
        except ApiError as error:
            if error.status != 404:
                raise

    async def _let_go(self, pod: Pod) -> None:
        if not pod.free:
            return  # a call got there first: Knative drains it
        self._pods.draining(pod.name)
        await asyncio.to_thread(self._api.delete, core(self._namespace, "pods", pod.name), grace_s=GRACE_S)

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
            left_s = pod.reason_since_s + self._timing.pending_s - _now_s()
            restarts = pod.restarts >= self._timing.failed_starts
            if not pod.reason.patient or restarts or left_s <= 0:
                function.fail(f"replicas of {function.spec.name!r} do not start: {pod.reason.line}")
                return None
            due_s.append(left_s)
        return min(due_s, default=None)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
