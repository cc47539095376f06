"""The application: routes, tokens, problems, and the task that keeps jobs going."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from threading import Thread
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import PlainTextResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from functions.base.prometheus import CONTENT_TYPE
from orchestrator.api import problems
from orchestrator.api.auth import Tokens
from orchestrator.api.feed import Feeds
from orchestrator.api.files import file_routes
from orchestrator.api.jobs import Jobs
from orchestrator.api.metrics import Measured, RequestMetrics, jobs_text
from orchestrator.api.page import page_routes
from orchestrator.api.problems import ApiError, Problem, responses
from orchestrator.api.routes import Site, job_routes
from orchestrator.api.same_origin import SameOrigin
from orchestrator.api.view_routes import view_routes
from orchestrator.base.background import guarded, stopped
from orchestrator.base.errors import OrchestratorError
from orchestrator.job.config import JobConfig

TICK_S = 1.0
"""How often the launcher is asked which orchestrators are alive."""
log = logging.getLogger(__name__)
bearer = HTTPBearer(auto_error=False, description="A token of the server's token file")
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]
"""Puts the scheme into the OpenAPI document; Tokens reads the header."""


class Health(BaseModel):
    status: str


def create_app(jobs: Jobs, site: Site, tokens: Tokens, *, loopback: bool) -> FastAPI:
    """`loopback`: the server listens on this machine alone."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        Thread(target=jobs.sweep, name="sweep", daemon=True).start()  # stores may be away: nobody waits for it
        app.state.keeper = keeper = guarded("the keeper of jobs", partial(keep_going, jobs), log.critical)
        stores = guarded("the keeper of credentials", partial(keep_stores, jobs), log.critical)
        leading = guarded("the election", partial(keep_leading, jobs), log.critical)
        yield
        jobs.changed.set()  # its thread waits for this
        await stopped(keeper)
        await stopped(stores)
        await stopped(leading)
        await asyncio.to_thread(jobs.close)

    app = FastAPI(
        title="rlhf-orchestrate", version=_version(), lifespan=lifespan, docs_url=None, redoc_url=None
    )  # whose pages fetch scripts from elsewhere
    problems.install(app)
    requests = RequestMetrics()
    app.add_middleware(SameOrigin, loopback=loopback)
    app.add_middleware(Measured, metrics=requests)

    async def reads(request: Request, _scheme: Credentials) -> None:
        tokens.check(request.headers.get("authorization"), "read")

    async def writes(request: Request, _scheme: Credentials) -> None:
        request.state.token = tokens.check(request.headers.get("authorization"), "write")

    app.include_router(job_routes(jobs, Feeds(jobs), site, reads, writes))
    app.include_router(view_routes(jobs, reads))
    app.include_router(file_routes(jobs, writes))
    app.include_router(page_routes())

    @app.get(
        "/healthz", operation_id="health", tags=["server"], summary="The server answers, and keeps jobs going",
        responses=responses(503),
    )  # fmt: skip
    async def healthz() -> Health:
        if app.state.keeper.done():
            raise ApiError(503, "the task that keeps jobs going has ended; the server's log says why")
        return Health(status="ok")

    @app.get(
        "/readyz", operation_id="ready", tags=["server"], summary="The server knows all jobs", responses=responses(503)
    )
    async def readyz() -> Health:
        if not jobs.ready.is_set():
            raise ApiError(503, "the server has not read the runs yet; its log says what it waits for")
        return Health(status="ok")

    @app.get(
        "/metrics", operation_id="prometheus", tags=["server"], summary="Prometheus metrics",
        dependencies=[Depends(reads)], response_class=PlainTextResponse,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **responses(401)},
    )  # fmt: skip
    def metrics() -> PlainTextResponse:
        told = jobs_text(jobs.all(), jobs.runs) if jobs.leads() else ""  # else the leader tells it
        return PlainTextResponse(told + requests.text(), media_type=CONTENT_TYPE)

    original = app.openapi
    app.openapi = lambda: _complete(app, original())  # type: ignore[method-assign]  # FastAPI's documented way
    return app


async def keep_going(jobs: Jobs) -> None:
    """Makes `tick` follow every change, and the end of every orchestrator within TICK_S."""
    while True:
        jobs.changed.clear()
        try:
            await asyncio.to_thread(jobs.tick)
        except (OrchestratorError, OSError) as error:  # launcher or disk is away: the jobs go on without us
            log.error("%s", error)
        await asyncio.to_thread(jobs.changed.wait, TICK_S)


async def keep_leading(jobs: Jobs) -> None:
    """Apart from both: whoever waits for a store goes on leading."""
    while True:
        await asyncio.to_thread(jobs.leads.look)
        await asyncio.sleep(TICK_S)


async def keep_stores(jobs: Jobs) -> None:
    """Apart from `keep_going`: a store that is away holds up no job of another."""
    while True:
        try:
            if jobs.leads():
                await asyncio.to_thread(jobs.launcher.keep)
        except OrchestratorError as error:
            log.error("%s", error)
        await asyncio.sleep(TICK_S)


def _complete(app: FastAPI, document: dict[str, Any]) -> dict[str, Any]:
    """The job's schema and the problem's, which no route's signature names."""
    if "Problem" not in document["components"]["schemas"]:
        template = "#/components/schemas/{model}"
        _, schemas = models_json_schema([(JobConfig, "validation"), (Problem, "serialization")], ref_template=template)
        document["components"]["schemas"] |= schemas["$defs"]
        document["components"]["schemas"].pop("HTTPValidationError", None)
        document["components"]["schemas"].pop("ValidationError", None)
        for operations in document["paths"].values():
            for operation in operations.values():
                for parameter in operation.get("parameters", ()):
                    parameter["schema"] = _without_null(parameter["schema"])
        app.openapi_schema = document
    return document


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A parameter that may be left out; a query or header cannot say null."""
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    return {**{k: v for k, v in schema.items() if k != "anyOf"}, **kinds[0]} if len(kinds) == 1 else schema


def _version() -> str:
    try:
        return version("rlhf-orchestrate")
    except PackageNotFoundError:
        return "0"
