"""The platform of a cluster: each function a Knative Service, each replica a pod.

    deploy   Lease --owns--> token Secret, Services (at zero)          lease, manifests, kn
    scale    min-scale on the Revision, wake-up, victims               scale
    call     POST through ingress or cluster-local name                calls
    replicas, usage   pods as the API shows them                       watch
    close    Services deleted, then what is left of their pods

The orchestrator holds no state that the cluster needs: it may die at any moment, and be started again, here or
elsewhere; `deploy` takes over what it finds.
"""

import asyncio
import base64
import math
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

from functions.base.wire import Call, Event
from orchestrator.base.clock import now_s
from orchestrator.base.errors import Away
from orchestrator.platforms.base import CallLost, FunctionSpec, PlatformError, Replica, Usage
from orchestrator.platforms.knative import manifests
from orchestrator.platforms.knative.api import ApiError, Json, KubeApi, core, serving
from orchestrator.platforms.knative.calls import Caller
from orchestrator.platforms.knative.kn import CLUSTER, apply_service, find_kn, hint
from orchestrator.platforms.knative.kueue import check_queue
from orchestrator.platforms.knative.lease import Lease, LeaseLost
from orchestrator.platforms.knative.placement import Homes
from orchestrator.platforms.knative.scale import GRACE_S, Function, Scaler, Timing
from orchestrator.platforms.knative.services import POLL_S, Services
from orchestrator.platforms.knative.watch import Pod, Pods, PodWatch
from orchestrator.platforms.queue import deployed

LOSS_S = 1.5
"""How long a lost call waits for the watch to tell why."""


class KnativePlatform:
    """See Platform."""

    def __init__(self, context: manifests.JobContext, *, timing: Timing | None = None) -> None:
        self._context = context
        self._config = context.config
        self._timing = timing or Timing()
        self._api = KubeApi(context.config.context)
        self._kn = find_kn()
        self._functions: dict[str, Function] = {}
        self._pods = Pods(self._pods_changed)
        self._homes = Homes(self._api, context)
        self._services = Services(self._api, context, self._timing.ready_s)
        self._caller: Caller | None = None
        self._watch: PodWatch | None = None
        self._lease: Lease | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._deployed = False
        self._closed = False

    async def deploy(self, specs: Sequence[FunctionSpec]) -> None:
        if self._closed:
            raise PlatformError("the Knative platform is closed")
        try:
            await asyncio.to_thread(check_queue, self._api, self._config)
            if self._lease is None:
                lease = Lease(self._api, self._context, self._timing.lease_s)
                await lease.take()
                self._lease = lease
                self._spawn(self._keep_lease())
            if self._caller is None:
                self._caller = Caller(self._config.ingress, await self._own_token(self._lease, specs))
            if self._watch is None:
                watch = PodWatch(self._api, self._context, self._pods.apply)
                await watch.ready()
                self._watch = watch
                self._spawn(watch.supervise())
            await _all(self._deploy(spec) for spec in specs)
            if self._config.node_agent is not None and not self._deployed:
                self._spawn(self._homes.sweep())
            self._deployed = True
        except ApiError as error:
            if error.away:
                raise Away(CLUSTER, f"deploying {self._context.job}: {error.message}") from error
            raise PlatformError(f"deploying {self._context.job}: {error.message}{hint(error.message)}") from error

    async def scale(self, function: str, replicas: int) -> None:
        deployed(self._functions, function).want(replicas)

    async def call(self, function: str, call: Call) -> AsyncIterator[Event]:
        queue = deployed(self._functions, function)
        await queue.acquire()
        queue.unplaced += 1
        queue.last_request_s = now_s()
        pod, over, whole = "", False, False
        try:
            async with aclosing(self._events(queue, call)) as events:
                async for event in events:
                    if event.kind == "started":
                        pod = str(event.data["replica"])
                        queue.unplaced -= 1
                        queue.last_request_s = now_s()
                        taken = self._pods.take(function, pod)
                        taken.parked_s = float(event.data.get("parked_s", 0.0))
                        if self._config.node_agent is not None and event.data["calls"] == 0:
                            event = replace(event, data={**event.data, **self._placed(taken)})
                        queue.changed.set()
                    if event.kind in ("done", "error"):
                        whole = "deadline_s" not in event.data
                        self._over(queue, pod)  # before it is yielded: whoever reads it may let the replica go
                        over = True
                    yield event
        except CallLost as error:
            raise CallLost(str(error) + await self._why(pod)) from error
        finally:
            if not over:
                self._over(queue, pod)
            if pod and not whole:
                self._replace(queue, pod)

    def replicas(self) -> list[Replica]:
        return self._pods.replicas()

    def usage(self) -> list[Usage]:
        return self._pods.usage()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for function in self._functions.values():
            function.want(0)
        try:
            with suppress(ApiError):  # a cluster that does not answer: the lease runs out
                await self._remove()
        finally:
            if self._watch is not None:
                self._watch.stop()
            if self._caller is not None:
                await self._caller.close()

    # --- deploy ----------------------------------------------------------------------------------------------------

    async def _own_token(self, lease: Lease, specs: Sequence[FunctionSpec]) -> str:
        """The job's bearer token: the one that its pods have, if there are any, or a new one. All gates are up."""
        secrets_path = core(self._config.namespace, "secrets")
        path = f"{secrets_path}/{self._context.secret}"
        body = manifests.secret(self._context, secrets.token_urlsafe(32))
        body["metadata"] |= manifests.owned_by(lease.job)["metadata"]
        try:
            found = await asyncio.to_thread(self._api.create, secrets_path, body)
        except ApiError as error:
            if error.status != 409:
                raise
            found = await asyncio.to_thread(self._api.merge, path, {})  # read without the right to read all Secrets
        manifests.check_own(self._context, "Secret", found)
        up = manifests.gates((spec.name for spec in specs), up=True)
        await asyncio.to_thread(self._api.merge, path, up | manifests.owned_by(lease.job))
        return base64.b64decode(found["data"][manifests.TOKEN_KEY]).decode()

    async def _deploy(self, spec: FunctionSpec) -> None:
        owner = self._owner()
        manifest = manifests.service(self._context, spec)
        manifest["metadata"] |= owner["metadata"]
        name = manifests.service_name(self._context.job, spec.name)
        path = serving(self._config.namespace, "services", name)
        await self._services.own(path)
        await apply_service(self._api, manifest, kn=self._kn, context=self._config.context)
        await asyncio.to_thread(self._api.merge, path, owner)
        if self._owner() != owner:
            raise Away(CLUSTER, f"deploying {self._context.job}: the lease is another one meanwhile")
        status = await self._services.ready(name, path)
        revision = status["latestReadyRevisionName"]
        found = await asyncio.to_thread(self._api.get, serving(self._config.namespace, "revisions", revision))
        applied = int(found["metadata"].get("annotations", {}).get(manifests.MIN_SCALE, "0"))
        known = self._functions.get(spec.name)
        if known is not None:
            known.spec, known.revision, known.applied = spec, revision, applied
            known.changed.set()
            return
        function = Function(spec, revision, status["address"]["url"], applied)
        self._functions[spec.name] = function
        scaler = Scaler(self._api, self._context, function, self._pods, self._timing, self._wake, self._lease_job)
        self._spawn(scaler.run())
        function.changed.set()

    def _owner(self) -> Json:
        """What lives as long as the lease says so. Raises Away where it has run out, and none is taken yet."""
        if self._lease is None:
            raise Away(CLUSTER, f"deploying {self._context.job}: the lease ran out meanwhile")
        return manifests.owned_by(self._lease.job)

    def _lease_job(self) -> Json:
        assert self._lease is not None, "taken before anything is scaled"
        return self._lease.job

    async def _keep_lease(self) -> None:
        """Renews the lease; when it was lost with all it owned, takes another and deploys again."""
        while True:
            await asyncio.sleep(self._timing.renew_s)
            try:
                assert self._lease is not None, "taken before this task began"
                await self._lease.renew()
            except LeaseLost:
                if not self._deployed:  # the API was away: `deploy` is made again, and takes another
                    self._lease, lost = None, self._caller
                    self._caller = None
                    if lost is not None:
                        await lost.close()
                    return
                await self._redeploy()
            except ApiError:
                continue

    async def _redeploy(self) -> None:
        assert self._caller is not None, "there was a lease to lose"
        specs = [function.spec for function in self._functions.values()]
        while True:
            try:
                lease = Lease(self._api, self._context, self._timing.lease_s)
                await lease.take()
                self._lease = lease
                self._caller.token = await self._own_token(lease, specs)
                await _all(self._deploy(spec) for spec in specs)
                return
            except (ApiError, Away):
                await asyncio.sleep(self._timing.renew_s)
            except PlatformError as error:
                for function in self._functions.values():
                    function.fail(str(error))
                return

    # --- calls -----------------------------------------------------------------------------------------------------

    async def _events(self, queue: Function, call: Call) -> AsyncGenerator[Event, None]:
        """Of one attempt; its request is made again where Knative has sent it astray."""
        assert self._caller is not None, "deployed functions have a caller"
        while True:
            async with aclosing(self._caller.events(queue.address, call)) as events:
                try:
                    first = await self._first(queue, events)
                except TimeoutError:
                    queue.last_request_s = now_s()
                    continue
                if first is not None:
                    yield first
                async for event in events:
                    yield event
                return

    async def _first(self, queue: Function, events: AsyncGenerator[Event, None]) -> Event | None:
        """The event with which a replica answers; None: an answer without one. Raises PlatformError for what keeps the
        function from having one, TimeoutError where one has been idle for `astray_s` and the request does not come to
        it."""
        answer = asyncio.ensure_future(anext(events, None))
        failed = asyncio.ensure_future(queue.failed.wait())
        astray_s = self._timing.astray_s
        began_s = now_s()
        try:
            while not answer.done():
                await asyncio.wait((answer, failed), timeout=astray_s, return_when=asyncio.FIRST_COMPLETED)
                if failed.done() and not answer.done():
                    raise PlatformError(queue.failure)
                idle = [pod.since_s for pod in self._pods.of(queue.spec.name) if pod.state == "idle"]
                if not answer.done() and now_s() - max(began_s, min(idle, default=math.inf)) >= astray_s:
                    raise TimeoutError
            return answer.result()
        finally:
            failed.cancel()
            if not answer.done():
                answer.cancel()
                await asyncio.wait((answer,))

    def _placed(self, pod: Pod) -> dict[str, str | bool]:
        """Of a replica's first call: where it runs, and whether its function's state is elsewhere."""
        strange = self._homes.strange(pod.function, pod.node)
        nodes = frozenset(one.node for one in self._pods.of(pod.function) if one.live and one.node)
        self._spawn(self._homes.moved(pod.function, nodes, found=pod.parked_s > 0))
        return {"node": pod.node, "strange": strange}

    def _over(self, queue: Function, pod: str) -> None:
        """An attempt has ended, on `pod` or before it came to one."""
        if pod:
            self._pods.release(pod)
        else:
            queue.unplaced -= 1
        queue.release()

    def _replace(self, queue: Function, pod: str) -> None:
        """A replica whose answer was not whole may be stuck or cut off: nobody but us would replace it."""
        queue.changed.set()
        self._pods.draining(pod)
        self._spawn(self._delete_pod(pod))

    async def _delete_pod(self, pod: str) -> None:
        with suppress(ApiError):  # then it is found to be idle, and let go as such
            await asyncio.to_thread(self._api.delete, core(self._config.namespace, "pods", pod), grace_s=GRACE_S)

    async def _why(self, name: str) -> str:
        """What became of the pod whose call was lost, if the watch can tell."""
        until_s = now_s() + LOSS_S
        while name and now_s() < until_s:
            pod = self._pods.named(name)
            if pod is not None and pod.reason is not None:
                return f" ({pod.reason.line})"
            if pod is not None and not pod.live:
                return f" ({name} was deleted)"
            await asyncio.sleep(POLL_S)
        return ""

    async def _wake(self, function: Function, limit_s: float) -> bool:
        assert self._caller is not None, "deployed functions have a caller"
        function.last_request_s = now_s()
        return await self._caller.wake(function.address, limit_s)

    # --- close -----------------------------------------------------------------------------------------------------

    async def _remove(self) -> None:
        """Services first, or their pods would be replaced; then pods, with a short grace, as long as any live."""
        namespace, delete = self._config.namespace, self._api.delete
        names = [manifests.service_name(self._context.job, name) for name in self._functions]
        await asyncio.gather(*(self._services.delete(serving(namespace, "services", name)) for name in names))
        until_s = now_s() + self._timing.close_s
        while self._pods.replicas() and now_s() < until_s:
            live = self._pods.undeleted()
            await asyncio.gather(
                *(asyncio.to_thread(delete, core(namespace, "pods", n), grace_s=GRACE_S) for n in live)
            )
            await asyncio.sleep(POLL_S)
        if self._config.node_agent is not None:
            await self._homes.forget()
        if self._lease is not None:
            await self._lease.drop()

    # -----------------------------------------------------------------------------------------------------------------

    def _pods_changed(self, name: str) -> None:
        function = self._functions.get(name)
        if function is not None:
            function.changed.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """A task that lives no longer than the platform; when one fails, so do all functions."""
        if self._closed:
            work.close()
            return
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        self._tasks.add(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            for function in self._functions.values():
                function.fail(f"the Knative platform failed: {error!r}")


async def _all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """To the end of each, also where one fails: nothing of a deployment goes on beside its repetition. A failure that
    is for good is raised before one that may pass."""
    ended = await asyncio.gather(*works, return_exceptions=True)
    failed = [error for error in ended if error is not None]
    for error in sorted(
        failed, key=lambda error: isinstance(error, Away) or (isinstance(error, ApiError) and error.away)
    ):
        raise error
