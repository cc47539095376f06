"""A stand-in for a cluster with Knative: the API paths that the platform uses, the ingress, and a kubeconfig.

It is not kinder than a real one (tests/knative/objects.py has the traps). Replicas are real: processes with
functions/server/app.py, forked from a node agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.knative.objects import Cluster
from tests.knative.parts import SPEED, Json, Pod, Refused, Revision
from tests.support.kubeconfig import kubeconfig

T = TypeVar("T")
PREFIXES = {
    "/api/v1": "",
    "/apis/apps/v1": "",
    "/apis/batch/v1": "",
    "/apis/serving.knative.dev/v1": "",
    "/apis/autoscaling.internal.knative.dev/v1alpha1": "",
}
PASSED_ON = {"server": "envoy", "x-envoy-upstream-service-time": "3"}
"""Of answers that are not the ingress's own."""


class ControlPlane:
    """Runs in a thread of its own, until `close`."""

    def __init__(self, root: Path, **limits: Any) -> None:
        self.root = root
        self._limits = limits
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._started.wait(30)

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.cluster = Cluster(self.root, **self._limits)
        self.away = False
        """The API does not answer."""
        self.instead: Response | None = None
        """What the ingress answers to every request."""
        self.astray = 0
        """The next requests that wait behind another, whoever is free."""
        self.statics: dict[str, Json] = {}
        self.denied: set[tuple[str, str]] = set()
        paths = [f"{prefix}/namespaces/{{ns}}/{{kind}}" for prefix in PREFIXES]
        verbs = ["GET", "POST", "PATCH", "DELETE"]
        api = [
            Route(path + rest, self._api, methods=verbs) for path in paths for rest in ("", "/{name}", "/{name}/scale")
        ]
        api.append(Route("/{path:path}", self._static, methods=["GET", "POST"]))
        ingress = [Route("/{path:path}", self._ingress, methods=["GET", "POST"])]
        self._servers = []
        ports = []
        for routes in (api, ingress):
            listener = socket.create_server(("127.0.0.1", 0))
            ports.append(listener.getsockname()[1])
            config = uvicorn.Config(
                Starlette(routes=routes),
                log_config=None,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=1,
                server_header=False,
            )
            server = uvicorn.Server(config)
            server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
            self._servers.append((server, listener))
        self.api_url, self.ingress_url = (f"http://127.0.0.1:{port}" for port in ports)
        self._started.set()
        try:
            await asyncio.gather(*(server.serve(sockets=[listener]) for server, listener in self._servers))
        finally:
            await self.cluster.close()

    def close(self) -> None:
        for server, _ in self._servers:
            server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    def kubeconfig(self) -> Path:
        return kubeconfig(self.root, self.api_url)

    def ask(self, question: Callable[[Cluster], T]) -> T:
        """Runs `question` in the cluster's loop."""

        async def run() -> T:
            return question(self.cluster)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    # --- API -------------------------------------------------------------------------------------------------------

    async def _api(self, request: Request) -> Response:
        if self.away:
            return JSONResponse({"kind": "Status", "message": "etcdserver: leader changed"}, 503)
        if request.headers.get("authorization") != "Bearer t":
            return JSONResponse({"kind": "Status", "message": "Unauthorized"}, 401)
        kind, name = request.path_params["kind"], request.path_params.get("name")
        if request.method != "GET":
            self.cluster.writes.append((request.method, kind, name or ""))
        try:
            body = json.loads(await request.body() or b"null")
            return self._answer(request, kind, name, body)
        except Refused as refused:
            return JSONResponse({"kind": "Status", "message": refused.message}, refused.status)

    async def _static(self, request: Request) -> Response:
        """What is read for the doctor: `statics` by path; every right is granted but those in `denied`."""
        path = f"/{request.path_params['path']}"
        if path.endswith("selfsubjectaccessreviews"):
            asked = json.loads(await request.body())["spec"]["resourceAttributes"]
            return JSONResponse({"status": {"allowed": (asked["resource"], asked["verb"]) not in self.denied}}, 201)
        if path not in self.statics:
            return JSONResponse({"kind": "Status", "message": f"{path} not found"}, 404)
        return JSONResponse(self.statics[path])

    def _answer(self, request: Request, kind: str, name: str | None, body: Json) -> Response:
        cluster = self.cluster
        if request.method == "POST":
            return JSONResponse(cluster.create(kind, body), 201)
        if name is None:
            assert kind == "pods", "only pods are listed"
            selector = request.query_params["labelSelector"]
            if request.query_params.get("watch"):
                return StreamingResponse(self._watch(int(request.query_params["resourceVersion"]), selector))
            leases = [value["spec"]["template"] for (of, _), value in cluster.objects.items() if of == "jobs"]
            agents = [value for (of, _), value in cluster.objects.items() if of == "pods"]
            pods = [pod.value for pod in cluster.pods.values()]
            items = [value for value in (*pods, *leases, *agents) if _selected(value, selector)]
            seen = cluster.events[-1][0] if cluster.events else 0
            return JSONResponse({"items": items, "metadata": {"resourceVersion": str(seen)}})
        if request.method == "GET":
            return JSONResponse(cluster.get(kind, name))
        if request.method == "DELETE":
            uid = ((body or {}).get("preconditions") or {}).get("uid")
            if uid is not None and cluster.get(kind, name)["metadata"]["uid"] != uid:
                raise Refused(409, f'{kind} "{name}": the UID in the precondition does not match')
            cluster.delete(kind, name, (body or {}).get("gracePeriodSeconds"))
            return JSONResponse({"kind": "Status", "status": "Success"})
        if request.headers["content-type"] == "application/apply-patch+yaml":
            assert request.query_params["fieldManager"]
            return JSONResponse(cluster.apply_service(body))
        how = request.headers["content-type"]
        assert how in ("application/merge-patch+json", "application/strategic-merge-patch+json")
        return JSONResponse(cluster.patch(kind, name, body, strategic="strategic" in how))

    async def _watch(self, seen: int, selector: str) -> AsyncIterator[bytes]:
        cluster = self.cluster
        while not self._servers[0][0].should_exit:
            for version, kind, value in [event for event in cluster.events if event[0] > seen]:
                seen = version
                if _selected(value, selector):
                    yield json.dumps({"type": kind, "object": value}).encode() + b"\n"
            if not cluster.events or cluster.events[-1][0] <= seen:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(cluster.moved.wait(), 0.2)

    # --- ingress, activator, queue-proxy -----------------------------------------------------------------------------

    async def _ingress(self, request: Request) -> Response:
        name = request.headers["host"].split(".")[0]
        service = self.cluster.objects.get(("services", name))
        if service is None or "latestReadyRevisionName" not in service.get("status", {}):
            return Response(status_code=404)
        revision = self.cluster.revisions[service["status"]["latestReadyRevisionName"]]
        body = await request.body()
        if self.instead is not None:
            return self.instead
        if self.astray:
            self.astray -= 1
            await asyncio.Event().wait()
        pod = await self._free(revision)
        revision.requests += 1
        duplex = revision.template["metadata"]["annotations"].get("features.knative.dev/http-full-duplex")
        if duplex != "Enabled" and revision.requests % 3 == 0:  # the response began before the request had ended
            return Relayed(_cut(), 200, PASSED_ON)
        pod.busy = True
        transport = httpx.AsyncHTTPTransport(uds=str(pod.path))
        client = httpx.AsyncClient(transport=transport, timeout=None)
        headers = {k: v for k, v in request.headers.items() if k in ("authorization", "content-type")}
        message = client.build_request(
            request.method, f"http://pod/{request.path_params['path']}", content=body, headers=headers
        )
        try:
            response = await client.send(message, stream=True)
        except httpx.TransportError:
            await self._free_again(pod, client)
            return Response("EOF", 502, PASSED_ON)
        limit_s = revision.template["spec"]["timeoutSeconds"] / SPEED
        return Relayed(self._relay(pod, client, response, limit_s), response.status_code, PASSED_ON)

    async def _free(self, revision: Revision) -> Pod:
        """A ready pod without a request; the activator holds what finds none. One request a pod, always."""
        revision.waiting += 1
        try:
            while True:
                self.cluster.poke(revision)
                for pod in revision.live:
                    if pod.ready and not pod.busy:
                        return pod
                revision.freed.clear()
                await revision.freed.wait()
        finally:
            revision.waiting -= 1

    async def _relay(
        self, pod: Pod, client: httpx.AsyncClient, response: httpx.Response, limit_s: float
    ) -> AsyncIterator[bytes]:
        try:
            async with asyncio.timeout(limit_s):
                async for block in response.aiter_raw():
                    yield block
        except TimeoutError:
            yield b"activator request timeout"  # and the end is clean
        finally:
            await self._free_again(pod, client)

    async def _free_again(self, pod: Pod, client: httpx.AsyncClient) -> None:
        await client.aclose()
        pod.busy = False
        pod.revision.freed.set()


class Relayed(StreamingResponse):
    """Cut off, not ended, when the replica is."""

    async def stream_response(self, send: Any) -> None:
        try:
            await super().stream_response(send)
        except httpx.TransportError:
            await asyncio.sleep(1 / SPEED)
            raise ConnectionResetError("the replica is gone") from None


async def _cut() -> AsyncIterator[bytes]:
    raise httpx.ReadError("upstream protocol error")
    yield b""


def _selected(value: Json, selector: str) -> bool:
    labels: dict[str, str] = value["metadata"]["labels"]
    terms = [term.partition("=") for term in selector.split(",")]
    return all(key in labels and (not equals or labels[key] == wanted) for key, equals, wanted in terms)
