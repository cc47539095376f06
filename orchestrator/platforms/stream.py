"""One attempt at a call over HTTP: the events of its answer, line by line.

Whatever breaks between us and the function is CallLost. The end marker is the `done` or `error` line, not the end of
the response: Knative ends one that ran into its time limit as a clean 200.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Container
from contextlib import suppress

import httpx

from functions.base.wire import Event, WireError
from orchestrator.base.errors import Away
from orchestrator.platforms.base import CallLost, PlatformError

END_S = 1.0
BY_ENVOY = (502, 503, 504)


async def stream(
    client: httpx.AsyncClient, request: httpx.Request, what: str, *, lost: Container[int], away: str = ""
) -> AsyncGenerator[Event, None]:
    """The events, to `done` or `error`. Raises CallLost, also for the statuses in `lost`; PlatformError for others.

    `what` names the call in messages; `away` what is away where nobody takes the connection, or an ingress says that
    nobody behind it does (Away; empty: CallLost).
    """
    if client.is_closed:  # httpx would raise RuntimeError
        raise CallLost(f"{what} was not sent: the platform is closed")
    try:
        response = await client.send(request, stream=True)
    except httpx.TransportError as error:
        if away and isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            raise Away(away, f"{what}: {error or type(error).__name__}") from error
        raise CallLost(f"{what}: {error or type(error).__name__}") from error
    try:
        if response.status_code != 200:
            await _refused(what, response, lost, away)
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
    except (httpx.TransportError, WireError) as error:
        raise CallLost(f"{what} was cut: {error or type(error).__name__}") from error
    finally:
        await response.aclose()
    raise CallLost(f"the answer to {what} ended without `done` or `error`")


async def _to_the_end(lines: AsyncIterator[str]) -> None:
    """Of an answer that has said all: the ingress breaks connections whose responses are closed before their end."""
    with suppress(httpx.TransportError, TimeoutError):
        async with asyncio.timeout(END_S):
            async for _ in lines:
                pass


async def _refused(what: str, response: httpx.Response, lost: Container[int], away: str) -> None:
    """Raises what a status other than 200 means."""
    text = (await response.aread()).decode(errors="replace").strip()
    try:
        text = json.loads(text)["detail"]
    except (ValueError, KeyError, TypeError):
        text = " ".join(text.split())[:200]
    message = f"{what} was answered with {response.status_code}: {text or 'no text'}"
    if away and _by_envoy(response):
        raise Away(away, message)
    raise CallLost(message) if response.status_code in lost else PlatformError(message)


def _by_envoy(response: httpx.Response) -> bool:
    """Whether the ingress (Envoy: Kourier, Istio, Contour) has answered for somebody who was not there.

    What it passes on has the time that it took (envoy/source/common/router/router.cc), its own answers have not.
    """
    headers = response.headers
    passed_on = headers.get("server") != "envoy" or "x-envoy-upstream-service-time" in headers
    return response.status_code in BY_ENVOY and not passed_on
