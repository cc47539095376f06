"""Other web pages may not use this API from a user's browser, whatever token that browser has.

A page of another site cannot read answers (no CORS headers are sent) and cannot set the Authorization header without
asking. What it can send unasked is refused here: changes that browsers mark as another site's (Sec-Fetch-Site, else an
Origin that is not the Host, as Go's http.CrossOriginProtection does), bodies of a type that forms send, and, where the
server listens on loopback, any request by a name that is not the machine's own (DNS rebinding).
"""

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from orchestrator.api.problems import problem

SAFE = ("GET", "HEAD", "OPTIONS")
BODIES = ("", "application/json", "application/toml", "application/octet-stream")
"""Content types that a request may have: a form cannot send them, but none at all."""


class SameOrigin:
    """ASGI middleware. `loopback`: the server listens on this machine alone."""

    def __init__(self, app: ASGIApp, *, loopback: bool) -> None:
        self._app, self._loopback = app, loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            refusal = refused(scope["method"], headers, loopback=self._loopback)
            if refusal is not None:
                await problem(*refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def refused(method: str, headers: Headers, *, loopback: bool) -> tuple[int, str] | None:
    """Status and reason of a request that another site's page may have sent; None: it may pass."""
    host = headers.get("host", "")
    if loopback and not is_loopback(_name(host)):
        return 403, f"Host {host!r} is not a name of this machine (localhost, 127.0.0.1); a proxy has to send one"
    if method in SAFE:
        return None
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site not in (None, "same-origin", "none"):
        return 403, "this request comes from a page of another site"
    if site is None and origin is not None and urlsplit(origin).netloc.lower() != host.lower():
        return 403, f"this request comes from {origin}, a page of another site"
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in BODIES:
        return 415, f"a request's body is {', '.join(BODIES[1:])}, got {kind}"
    return None


def is_loopback(name: str) -> bool:
    """Whether a host's name, or its address, is of this machine alone."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"


def _name(host: str) -> str:
    """`localhost` of `localhost:8080`, `::1` of `[::1]:8080`."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
