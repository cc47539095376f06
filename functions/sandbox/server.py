"""The sandbox as a service: `python -m functions.sandbox`, SandboxFusion's POST /run_code over this machine's sandbox.

It has no exchange, no job and no token: there is nothing in its container that a program could find. On Kubernetes it
is the chart's Knative Service `sandbox` (docs/sandbox.md).

POST /run_code          as remote.py says; 413 too large, 422 not understood
GET  /healthz           200

| environment     | default |                                             |
|-----------------|---------|---------------------------------------------|
| PORT            | 8080    | TCP port on all interfaces                  |
| RLHF_PROGRAMS   | CPUs    | programs at a time; more wait               |
| RLHF_MEMORY_MB  | 1024    | the most that one program may ask for       |
| RLHF_TIMEOUT_S  | 60      | the longest that one program may ask for    |
"""

import asyncio
import base64
import binascii
import json
import os
import sys
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from functions.base.http_limits import TooLarge, bounded_body, limited_server
from functions.sandbox.local import LocalSandbox
from functions.sandbox.program import Limits, Program, Result, Sandbox, SandboxError

LARGEST_BYTES = 64 << 20


@dataclass(frozen=True)
class Most:
    """What a request may ask for; more is cut down to it."""

    programs: int
    memory_mb: int = 1024
    timeout_s: float = 60.0


def app(sandbox: Sandbox, most: Most) -> FastAPI:
    served = FastAPI(title="rlhf-orchestrate sandbox", docs_url=None, redoc_url=None, openapi_url=None)
    free = asyncio.Semaphore(most.programs)

    async def run_code(request: Request) -> Response:
        try:
            program = _program(json.loads(await bounded_body(request, LARGEST_BYTES)), most)
        except TooLarge:
            return JSONResponse({"detail": f"a request has at most {LARGEST_BYTES} bytes"}, 413)
        except (ValueError, RecursionError) as error:
            return JSONResponse({"detail": " ".join(str(error).split())}, 422)
        async with free:
            try:
                return JSONResponse(_answer(await asyncio.to_thread(sandbox.run, program)))
            except SandboxError as error:
                return JSONResponse({"status": "SandboxError", "message": str(error)})

    async def health() -> Response:
        return PlainTextResponse("ok\n")

    served.add_api_route("/run_code", run_code, methods=["POST"], response_model=None)
    served.add_api_route("/healthz", health, methods=["GET"], response_model=None)
    return served


def _program(asked: Any, most: Most) -> Program:
    if not isinstance(asked, dict) or not isinstance(asked.get("code"), str):
        raise ValueError('wants an object with "code" and "language"')
    timeout_s, memory_mb = asked.get("run_timeout", 10), asked.get("memory_limit_MB", -1)
    if not isinstance(timeout_s, int | float) or not isinstance(memory_mb, int):
        raise ValueError("run_timeout and memory_limit_MB want numbers")
    memory_mb = most.memory_mb if memory_mb <= 0 else min(memory_mb, most.memory_mb)
    limits = Limits(timeout_s=min(float(timeout_s), most.timeout_s), memory_mb=memory_mb)
    try:
        files = {
            str(path): base64.b64decode(data or "", validate=True) for path, data in (asked.get("files") or {}).items()
        }
    except (TypeError, AttributeError, binascii.Error) as error:
        raise ValueError("files wants an object of paths with their content in base64") from error
    stdin = asked.get("stdin") or ""
    if not isinstance(stdin, str):
        raise ValueError("stdin wants a string")
    return Program(asked["code"], asked.get("language"), stdin, files, limits)  # type: ignore[arg-type]  # it checks


def _answer(result: Result) -> dict[str, Any]:
    late = result.status == "timeout"
    stderr = result.stderr + (f"\nended: {result.status} limit" if result.status in ("memory", "output") else "")
    run = {
        "status": "TimeLimitExceeded" if late else "Finished", "return_code": None if late else result.code,
        "execution_time": result.seconds, "stdout": result.stdout, "stderr": stderr,
    }  # fmt: skip
    return {"status": "Success" if result.ok else "Failed", "message": "", "compile_result": None, "run_result": run,
            "executor_pod_name": None, "files": {}}  # fmt: skip


def main() -> None:
    try:
        most = Most(
            int(os.environ.get("RLHF_PROGRAMS") or os.cpu_count() or 1),
            int(os.environ.get("RLHF_MEMORY_MB") or Most.memory_mb),
            float(os.environ.get("RLHF_TIMEOUT_S") or Most.timeout_s),
        )
        sandbox = LocalSandbox()
    except (ValueError, SandboxError) as error:
        sys.exit(str(error))
    try:
        limited_server(
            app(sandbox, most), host="0.0.0.0", port=int(os.environ.get("PORT", "8080")), lifespan="off"
        ).run()
    finally:
        sandbox.close()
