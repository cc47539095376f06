"""Every error of the API is a problem document (RFC 9457), `application/problem+json`.

{"type": "about:blank", "title": "Conflict", "status": 409, "detail": "job tiny-3f9a1c0b2d has succeeded", "errors": []}
"""

import logging
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from orchestrator.api.redact import redacted
from orchestrator.base.errors import Away, OrchestratorError

MEDIA_TYPE = "application/problem+json"
log = logging.getLogger(__name__)


class Problem(BaseModel):
    """RFC 9457."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    errors: list[str] = Field(default=[], description="One line per mistake, where there may be several")


class ApiError(Exception):
    """An answer that is a problem."""

    def __init__(
        self, status: int, detail: str, errors: Sequence[str] = (), headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.errors, self.headers = status, detail, errors, headers


def problem(
    status: int, detail: str, errors: Sequence[str] = (), headers: Mapping[str, str] | None = None
) -> JSONResponse:
    title = HTTPStatus(status).phrase
    lines = [redacted(line) for line in errors]
    body = Problem(title=title, status=status, detail=redacted(detail), errors=lines)
    return JSONResponse(body.model_dump(), status, headers=dict(headers or {}), media_type=MEDIA_TYPE)


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The problems that a route documents."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


def install(app: FastAPI) -> None:
    async def told(request: Request, error: Exception) -> JSONResponse:
        match error:
            case ApiError():
                return problem(error.status, error.detail, error.errors, error.headers)
            case RequestValidationError():
                lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
                return problem(422, "the request is not what this operation takes", lines)
            case HTTPException():
                headers = dict(error.headers or {})
                if error.status_code == 405:  # Starlette names the methods of the first route only
                    headers["Allow"] = ", ".join(sorted(_methods(app, request)))
                return problem(error.status_code, str(error.detail), headers=headers)
            case Away():
                return problem(503, str(error))
            case OrchestratorError():
                log.error("%s", error)
                return problem(500, str(error))
            case ClientDisconnect():
                return problem(408, "the request ended before its body")  # nobody hears this
        return problem(500, f"unexpected {type(error).__name__}; the server's log has the trace")

    for kind in (ApiError, RequestValidationError, HTTPException, OrchestratorError, ClientDisconnect, Exception):
        app.add_exception_handler(kind, told)


def _methods(app: FastAPI, request: Request) -> set[str]:
    """What the path of the request can be asked, by the OpenAPI document."""
    found: set[str] = set()
    for template, operations in app.openapi()["paths"].items():
        if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", template), request.url.path):
            found |= {method.upper() for method in operations}
    return found
