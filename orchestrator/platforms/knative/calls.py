"""Calls through Knative's data plane: HTTP with the function's name as Host. Knative retries nothing."""

import asyncio
from collections.abc import AsyncGenerator
from urllib.parse import urlsplit

import httpx

from functions.base.wire import Call, Event
from orchestrator.platforms.stream import stream

CONNECT_S = 10.0
LOST = (404, 408, 429, 500, 502, 503, 504)
"""Answers of the ingress, the activator and a replica that is not to have the call; 404: no route (yet)."""


class Caller:
    """`ingress` is where calls go, by Host header; None: each function's own cluster-local address."""

    def __init__(self, ingress: str | None, token: str) -> None:
        self._ingress = ingress
        self.token = token
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )

    def _request(self, method: str, address: str, path: str, body: object = None) -> httpx.Request:
        base = self._ingress or address
        headers = {"host": urlsplit(address).netloc} | (
            {"authorization": f"Bearer {self.token}"} if method == "POST" else {}
        )
        return self._client.build_request(method, f"{base.rstrip('/')}{path}", json=body, headers=headers)

    def events(self, address: str, call: Call) -> AsyncGenerator[Event, None]:
        """The events of one attempt, to `done` or `error`. Raises CallLost, PlatformError, Away."""
        request = self._request("POST", address, "/v1/call", call.to_json())
        return stream(self._client, request, f"call {call.id} to {address}", lost=LOST, away=self._ingress or address)

    async def wake(self, address: str, limit_s: float) -> bool:
        """One request that reaches a replica: without it min-scale does nothing on a Revision never yet active."""
        try:
            async with asyncio.timeout(limit_s):
                response = await self._client.send(self._request("GET", address, "/healthz/live"))
        except (httpx.TransportError, TimeoutError):
            return False
        return response.status_code == 200

    async def close(self) -> None:
        await self._client.aclose()
