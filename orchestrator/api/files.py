"""`PUT /v1/files/{bundle}`: what jobs read, from users who reach the API and nothing else.

    <runs>/.files/<bundle>/<path>      a bundle is one job's files, named by the digest of what they hold

A job names them by the directory that the answer gives. Bundles that no job names are removed a day after their last
file came, whenever another bundle begins.
"""

import asyncio
import filecmp
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path as FilePath
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic import BaseModel, Field

from orchestrator.api.jobs import Jobs
from orchestrator.api.problems import ApiError, responses
from orchestrator.run.stored import FILES

LARGEST_FILE_BYTES = 64 << 30
UNUSED_S = 86400.0
BUNDLE = r"^[0-9a-f]{16}$"
PLACE = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}(/[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}){0,7}$"


class Bundle(BaseModel):
    directory: str = Field(description="Where the bundle's files lie, as a job names them")


def file_routes(jobs: Jobs, writes: Callable[..., object]) -> APIRouter:
    router = APIRouter(prefix="/v1/files", tags=["files"])
    body = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}

    @router.put(
        "/{bundle}", operation_id="putFile", summary="Send one file of a bundle", status_code=201,
        response_model=Bundle, dependencies=[Depends(writes)], openapi_extra={"requestBody": body},
        responses=responses(401, 403, 409, 413, 422, 507),
    )  # fmt: skip
    async def put(
        request: Request,
        bundle: Annotated[str, Path(pattern=BUNDLE, description="Digest of what the bundle holds")],
        path: Annotated[str, Query(pattern=PLACE, max_length=400, description="The file's place in the bundle")],
    ) -> dict[str, Any]:
        directory = jobs.runs / FILES / bundle
        if not directory.exists():
            await asyncio.to_thread(sweep, jobs)
        await asyncio.to_thread(jobs.kept.bring, bundle, path)
        await _receive(request.stream(), directory, path)
        await asyncio.to_thread(jobs.kept.keep, bundle)
        return {"directory": str(directory)}

    return router


async def _receive(blocks: AsyncIterator[bytes], directory: FilePath, path: str) -> None:
    """Readers see the whole file or none."""
    temporary = directory / f".{uuid.uuid4().hex}"
    size_bytes = 0
    try:
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            async for block in blocks:
                size_bytes += len(block)
                if size_bytes > LARGEST_FILE_BYTES:
                    raise ApiError(413, f"{path}: a file may have {LARGEST_FILE_BYTES} bytes")
                file.write(block)
        _publish(temporary, directory / path, path)
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise ApiError(409, f"{path}: the bundle has a file where this wants a directory, or the reverse") from error
    except OSError as error:
        raise ApiError(507, f"{path} cannot be kept: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _publish(temporary: FilePath, target: FilePath, path: str) -> None:
    """A file that is there stays as it is: jobs were accepted with it. Raises ApiError 409 for another content."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        if not target.is_file() or not filecmp.cmp(temporary, target, shallow=False):
            raise ApiError(409, f"{path}: the bundle has it already, with another content") from None


def sweep(jobs: Jobs) -> None:
    """Removes bundles that no job names, and that nobody has sent anything to for a day."""
    named = "\n".join(job.config.model_dump_json() for job in jobs.all())
    for bundle, last_at in list(jobs.kept.bundles()):
        if bundle not in named and time.time() - last_at > UNUSED_S:
            jobs.kept.drop(bundle)
