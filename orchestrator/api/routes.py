"""The routes of `/v1/jobs`."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse

from functions.base.http_limits import TooLarge, bounded_body
from orchestrator.api import models
from orchestrator.api.feed import Feeds
from orchestrator.api.jobs import ID, Job, Jobs, State
from orchestrator.api.problems import ApiError, responses
from orchestrator.api.redact import redacted
from orchestrator.api.submission import JSON_TYPE, TOML_TYPE, read_job
from orchestrator.base.errors import OrchestratorError
from orchestrator.recipes import RECIPES
from orchestrator.recipes.settings import train_settings
from orchestrator.run.events import EVENT_TYPES
from orchestrator.run.stored import bundles

LARGEST_JOB_BYTES = 1 << 20
JobId = Annotated[str, Path(pattern=ID, max_length=48, description="A job's id")]


@dataclass(frozen=True)
class Site:
    """What jobs of this server may use, and what they get where they say nothing."""

    roots: Sequence[FilePath]
    """Absolute and resolved; relative paths of a job begin at the first."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    here: bool = False
    """Whether orchestrators run on this machine."""


def job_routes(
    jobs: Jobs, feeds: Feeds, site: Site, reads: Callable[..., object], writes: Callable[..., object]
) -> APIRouter:
    """`reads` and `writes` are the dependencies that check the caller's token."""
    router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
    reading, writing = [Depends(reads)], [Depends(writes)]
    known = responses(401, 404, 422)
    steers = responses(401, 403, 404, 409, 422)

    @router.post(
        "", operation_id="submitJob", summary="Submit a job", status_code=201, response_model=models.JobDetail,
        dependencies=writing, openapi_extra=_body(),
        responses={
            200: {"description": "The job that this Idempotency-Key made before", "model": models.JobDetail},
            201: {"links": _links()},
            **responses(401, 403, 413, 415, 422),
        },
    )  # fmt: skip
    async def submit(
        request: Request,
        response: Response,
        idempotency_key: Annotated[
            str | None, Header(min_length=1, max_length=200, description="A repeated request makes no second job")
        ] = None,
    ) -> dict[str, Any]:
        body = await _read(request)
        content_type = request.headers.get("content-type", "")
        for bundle in bundles(body.decode(errors="replace"), jobs.runs):
            await asyncio.to_thread(jobs.kept.bring, bundle)
        config = await asyncio.to_thread(
            read_job, body, content_type, roots=site.roots, defaults=site.defaults, here=site.here
        )
        job, new = await asyncio.to_thread(
            jobs.submit, config, key=idempotency_key, body=body, owner=request.state.token
        )
        response.status_code = 201 if new else 200
        response.headers["Location"] = f"/v1/jobs/{job.id}"
        return detail(job)

    @router.get(
        "", operation_id="listJobs", summary="List jobs, newest first", response_model=models.JobList,
        dependencies=reading, responses=responses(401, 422),
    )  # fmt: skip
    def list_jobs(
        state: Annotated[list[State] | None, Query(description="Only jobs in these states")] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        after: Annotated[str | None, Query(max_length=48, description="The `next` of the page before")] = None,
    ) -> dict[str, Any]:
        found = [job for job in jobs.all() if not state or job.state in state]
        begin = next((i + 1 for i, job in enumerate(found) if job.id == after), 0)
        page = found[begin : begin + limit]
        more = begin + limit < len(found)
        return {"jobs": [_view(job) for job in page], "next": page[-1].id if more else None}

    @router.get(
        "/{id}", operation_id="getJob", summary="A job and its configuration", response_model=models.JobDetail,
        dependencies=reading, responses=known,
    )  # fmt: skip
    def get(id: JobId) -> dict[str, Any]:
        return detail(jobs.get(id))

    @router.get(
        "/{id}/events", operation_id="followEvents", summary="Events as they come (server-sent events)",
        dependencies=reading, response_class=StreamingResponse,
        responses={
            200: {
                "description": "Events until nothing more will come; `Last-Event-ID` takes up after a break",
                "content": {"text/event-stream": {"schema": _event_schema()}},
            },
            204: {"description": "Nothing more will come: do not connect again"},
            **known,
        },
    )  # fmt: skip
    async def events(
        id: JobId,
        last_event_id: Annotated[int | None, Header(ge=0, le=2**53, description="The last event that was seen")] = None,
        after: Annotated[int, Query(ge=0, le=2**53, description="The same, for clients that set no headers")] = 0,
    ) -> Response:
        seen = after if last_event_id is None else last_event_id
        job = await asyncio.to_thread(jobs.get, id)
        if job.settled and job.summary.last_id <= seen:
            return Response(status_code=204)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(feeds.follow(id, seen), media_type="text/event-stream", headers=headers)

    @router.post(
        "/{id}/cancel", operation_id="cancelJob", summary="Stop a job; what is committed stays", status_code=202,
        response_model=models.JobView, dependencies=writing, responses=steers,
    )  # fmt: skip
    def cancel(id: JobId) -> dict[str, Any]:
        return _view(jobs.cancel(id))

    @router.post(
        "/{id}/resume", operation_id="resumeJob", summary="Go on with a job from its last committed step",
        status_code=202, response_model=models.JobView, dependencies=writing, responses=steers,
    )  # fmt: skip
    def resume(id: JobId) -> dict[str, Any]:
        return _view(jobs.resume(id))

    @router.delete(
        "/{id}", operation_id="deleteJob", summary="Delete a job that has ended, with all its files", status_code=204,
        dependencies=writing, responses=steers,
    )  # fmt: skip
    def delete(id: JobId) -> Response:
        jobs.delete(id)
        return Response(status_code=204)

    return router


def _body() -> dict[str, Any]:
    content = {
        JSON_TYPE: {"schema": {"$ref": "#/components/schemas/JobConfig"}},
        TOML_TYPE: {"schema": {"type": "string", "description": "A job file"}},
    }
    return {"requestBody": {"required": True, "content": content}}


def _links() -> dict[str, Any]:
    """What can be asked of the job that was made."""
    parameters = {"id": "$response.body#/id"}
    names = ("getJob", "followEvents", "getMetrics", "getCost", "getCostSteps", "listCheckpoints", "listSamples",
             "getReplicas", "getPlan", "listEvents", "getOutput", "cancelJob", "resumeJob", "deleteJob")  # fmt: skip
    return {name: {"operationId": name, "parameters": parameters} for name in names}


def _event_schema() -> dict[str, Any]:
    """One server-sent event; its `data` is JSON."""
    kind = {"type": "string", "enum": list(EVENT_TYPES)}
    event = {
        "type": "object",
        "required": ["id", "time", "type", "data"],
        "properties": {
            "id": {"type": "integer", "minimum": 1},
            "time": {"type": "number", "description": "Unix seconds"},
            "type": kind,
            "data": {"type": "object", "description": "By type, see docs/api.md"},
        },
    }
    data = {"type": "string", "contentMediaType": JSON_TYPE, "contentSchema": event}
    properties = {"id": {"type": "string", "pattern": "^[0-9]+$"}, "event": kind, "data": data}
    return {"type": "object", "required": ["id", "event", "data"], "properties": properties}


async def _read(request: Request) -> bytes:
    """Raises ApiError 413 as soon as there is too much of it."""
    try:
        return await bounded_body(request, LARGEST_JOB_BYTES)
    except TooLarge:
        raise ApiError(413, f"a job has at most {LARGEST_JOB_BYTES} bytes", headers={"Connection": "close"}) from None


def _view(job: Job) -> dict[str, Any]:
    shown = models.view(job)
    message = shown["message"]
    return shown | {"message": None if message is None else redacted(message)}


def detail(job: Job) -> dict[str, Any]:
    config = json.loads(redacted(job.config.model_dump_json()))
    knative = config["platform"]["knative"]
    if knative is not None:
        knative["env"] = dict.fromkeys(knative["env"], "***")
    return _view(job) | {"config": config | {"name": job.desired.name}, "trains": _trains(job)}


def _trains(job: Job) -> dict[str, Any]:
    """What each model is trained with. A recipe in a file of the user's is not looked at: it would run here."""
    recipe = RECIPES.get(job.config.recipe)
    if recipe is None:
        return {}
    try:
        found = {model: params.to_json() for model, params in train_settings(job.config, recipe).items()}
    except OrchestratorError:
        return {}  # a job of another version, or one that fails with just this
    told: dict[str, Any] = json.loads(redacted(json.dumps(found)))
    return told
