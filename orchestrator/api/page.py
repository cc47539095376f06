"""The dashboard's page: a few ES modules and style sheets as they lie in `web/`, without a build step.

Modules name each other by bare names (`app/job.js`, `preact`); an import map says where they are. A server's map names
`/assets/...`; a report's map holds the modules themselves as data: URLs, so that the same page is one file.
"""

import base64
import hashlib
import json
import mimetypes
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

from fastapi import APIRouter, Request, Response

from functions.base.wire import Json
from orchestrator.api.problems import ApiError

WEB = Path(__file__).with_name("web")
STYLES = ("vendor/uPlot.min.css", "css/theme.css", "css/page.css", "css/parts.css")
CHARTS = "vendor/uPlot.iife.min.js"
"""A plain script: uPlot's minified build is no module."""
VENDORED = {
    "preact": "vendor/preact.mjs",
    "preact/hooks": "vendor/preact-hooks.mjs",
    "htm": "vendor/htm.mjs",
    "@preact/signals": "vendor/signals.mjs",
    "@preact/signals-core": "vendor/signals-core.mjs",
}
START = "app/main.js"
SERVED = ("app", "css", "vendor")
ICON = "data:image/svg+xml," + "".join(
    (
        "%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Crect width='16' height='16' rx='3' ",
        "fill='%232f74d0'/%3E%3Cpath d='M2 12V6h2v6zm3 0V3h2v9zm4 0V6h2v6zm3 0V3h2v9z' fill='white'/%3E%3C/svg%3E",
    )
)


@dataclass(frozen=True)
class Asset:
    data: bytes
    media_type: str
    etag: str


@cache
def assets() -> dict[str, Asset]:
    """What is served under /assets/, by path."""
    found = {}
    for folder in SERVED:
        for path in sorted((WEB / folder).iterdir()):
            data = path.read_bytes()
            kind = "text/javascript" if path.suffix in (".js", ".mjs") else mimetypes.guess_type(path.name)[0]
            etag = f'"{hashlib.sha256(data).hexdigest()[:24]}"'
            found[f"{folder}/{path.name}"] = Asset(data, f"{kind or 'text/plain'}; charset=utf-8", etag)
    return found


@cache
def modules() -> dict[str, str]:
    """Bare name of each module to its path."""
    return VENDORED | {path: path for path in assets() if path.startswith("app/")}


def _text(path: str) -> str:
    return assets()[path].data.decode()


def _document(head: str, body: str) -> str:
    return (WEB / "index.html").read_text().replace("{head}", head).replace("{body}", body)


@cache
def index() -> tuple[str, str]:
    """The served page, and its Content-Security-Policy."""
    import_map = json.dumps({"imports": {name: f"/assets/{path}" for name, path in modules().items()}})
    digest = base64.b64encode(hashlib.sha256(import_map.encode()).digest()).decode()
    head = [
        "<title>rlhf-orchestrate</title>",
        f'<link rel="icon" href="{ICON}">',
        *(f'<link rel="stylesheet" href="/assets/{path}">' for path in STYLES),
        f'<script type="importmap">{import_map}</script>',
        *(f'<link rel="modulepreload" href="/assets/{path}">' for path in modules().values()),
        f'<script src="/assets/{CHARTS}" defer></script>',
        f'<script type="module" src="/assets/{START}"></script>',
    ]
    policy = (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return _document("\n".join(head), ""), policy


def report_page(title: str, data: Json) -> str:
    """One HTML document that needs nothing else: the page with its parts and `data` in it."""
    imports = {
        name: "data:text/javascript;base64," + base64.b64encode(assets()[path].data).decode()
        for name, path in modules().items()
    }
    policy = (
        "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = [
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        f"<title>{escape(title)}</title>",
        f'<link rel="icon" href="{ICON}">',
        *(f"<style>{_text(path)}</style>" for path in STYLES),
        f'<script type="importmap">{json.dumps({"imports": imports})}</script>',
    ]
    inlined = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    body = [
        f'<script type="application/json" id="data">{inlined}</script>',
        f"<script>{_text(CHARTS)}</script>",
        f'<script type="module">import "{START}";</script>',
    ]
    return _document("\n".join(head), "\n".join(body))


def page_routes() -> APIRouter:
    """`/` and `/jobs/{id}`: the page, which asks the API for the rest; it holds no data and wants no token."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    @router.get("/compare")
    @router.get("/jobs/{id}")
    async def page() -> Response:
        text, policy = index()
        headers = {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cache-Control": "no-cache",
        }
        return Response(text, media_type="text/html; charset=utf-8", headers=headers)

    @router.get("/assets/{path:path}")
    async def asset(path: str, request: Request) -> Response:
        found = assets().get(path)
        if found is None:
            raise ApiError(404, f"no asset {path!r}")
        headers = {"ETag": found.etag, "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
        if request.headers.get("if-none-match") == found.etag:
            return Response(status_code=304, headers=headers)
        return Response(found.data, media_type=found.media_type, headers=headers)

    return router
