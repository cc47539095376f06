"""Calls through Knative's data plane: HTTP with the function's name as Host, events as lines.

Whatever breaks between us and the function is CallLost: Knative retries nothing, and a response that ran into its time
limit ends as a clean 200. The end marker is the `done` or `error` line.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from urllib.parse import urlsplit

import httpx

from functions.base.wire import Call, Event, WireError
from orchestrator.platforms.base import CallLost, PlatformError

CONNECT_S = 10.0
END_S = 1.0
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

    async def events(self, address: str, call: Call) -> AsyncGenerator[Event, None]:
        """The events of one attempt, to `done` or `error`. Raises CallLost, PlatformError."""
        what = f"call {call.id} to {address}"
        try:
            response = await self._client.send(self._request("POST", address, "/v1/call", call.to_json()), stream=True)
        except httpx.TransportError as error:
            raise CallLost(f"{what}: {error or type(error).__name__}") from error
        try:
            if response.status_code != 200:
                await _refused(what, response)
            lines = response.aiter_lines()
            async for line in lines:
                if not line:
                    continue
                event = Event.from_line(line)
                if event.kind in ("done", "error"):
                    await _to_the_end(lines)
                    yield event
                    return
                yield event
        except httpx.TransportError as error:
            raise CallLost(f"{what} was cut: {error or type(error).__name__}") from error
        except WireError as error:
            raise CallLost(f"{what} was cut: {error}") from error
        finally:
            await response.aclose()
        raise CallLost(f"the answer to {what} ended without `done` or `error`")

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


async def _to_the_end(lines: AsyncIterator[str]) -> None:
    """Of an answer that has said all: the ingress breaks connections whose responses are closed before their end."""
    with suppress(httpx.TransportError, TimeoutError):
        async with asyncio.timeout(END_S):
            async for _ in lines:
                pass


async def _refused(what: str, response: httpx.Response) -> None:
    """Raises what a status other than 200 means."""
    text = (await response.aread()).decode(errors="replace").strip()
    try:
        text = json.loads(text)["detail"]
    except (ValueError, KeyError, TypeError):
        text = " ".join(text.split())[:200]
    message = f"{what} was answered with {response.status_code}: {text or 'no text'}"
    raise CallLost(message) if response.status_code in LOST else PlatformError(message)
