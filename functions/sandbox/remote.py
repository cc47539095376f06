"""A sandbox that others run, in SandboxFusion's HTTP form (bytedance/SandboxFusion, sandbox/server/sandbox_api.py).

POST URL    -> {"code", "language", "stdin", "files": {path: base64}, "run_timeout", "compile_timeout",
                "memory_limit_MB"}
            <- {"status": "Success" | "Failed" | "SandboxError", "message", "compile_result", "run_result":
                {"status": "Finished" | "Error" | "TimeLimitExceeded", "return_code", "execution_time", ...}}
"""

import base64
import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from functions.sandbox.program import Program, Result, SandboxError

ATTEMPTS = 4
PAUSE_S = 0.5
"""Before the second attempt; twice as long before each one after it."""
ANSWER_S = 30.0
"""What an answer may take beyond the time that the program has: queues, and starting."""


class RemoteSandbox:
    """`url` without a path gets /run_code."""

    def __init__(self, url: str, pause_s: float = PAUSE_S) -> None:
        self.url = url.rstrip("/") if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/run_code"
        self._pause_s = pause_s

    def run(self, program: Program) -> Result:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return _result(self._ask(program), program)
            except _Away as error:
                if attempt == ATTEMPTS:
                    raise SandboxError(f"sandbox {self.url} failed {ATTEMPTS} times: {error}") from error
                time.sleep(self._pause_s * 2 ** (attempt - 1))
        raise AssertionError("unreachable")

    def close(self) -> None:
        pass

    def _ask(self, program: Program) -> dict[str, Any]:
        timeout_s = program.limits.timeout_s
        body = {
            "code": program.code, "language": program.language, "stdin": program.stdin,
            "files": {path: base64.b64encode(data).decode() for path, data in program.files.items()},
            "run_timeout": timeout_s, "compile_timeout": timeout_s, "memory_limit_MB": program.limits.memory_mb,
        }  # fmt: skip
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=2 * timeout_s + ANSWER_S) as response:
                answer = json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                said = " ".join(error.read(300).decode(errors="replace").split())
            if error.code < 500 and error.code not in (408, 429):
                raise SandboxError(f"sandbox {self.url} answered {error.code}: {said}") from error
            raise _Away(f"it answered {error.code}: {said}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise _Away(f"it does not answer: {reason or type(error).__name__}") from error
        except ValueError as error:
            raise SandboxError(f"sandbox {self.url} answered no JSON; is it SandboxFusion's /run_code?") from error
        if not isinstance(answer, dict) or answer.get("status") not in ("Success", "Failed", "SandboxError"):
            raise SandboxError(f"sandbox {self.url} answered no status; is it SandboxFusion's /run_code?")
        return answer


class _Away(Exception):
    """Another attempt may succeed."""


def _result(answer: dict[str, Any], program: Program) -> Result:
    compiled, ran = answer.get("compile_result") or {}, answer.get("run_result") or {}
    last = ran or compiled
    if answer["status"] == "SandboxError" or not last or last.get("status") == "Error":
        raise _Away(" ".join(str(answer.get("message") or last.get("stderr") or "no result").split())[:300])
    limit = program.limits.output_kb << 10
    out, err = ((last.get(name) or "")[: limit + 1] for name in ("stdout", "stderr"))
    late, code = last.get("status") == "TimeLimitExceeded", last.get("return_code")
    status = "timeout" if late else "output" if max(len(out), len(err)) > limit else "finished"
    seconds = float(last.get("execution_time") or 0.0)
    return Result(status, -9 if code is None else int(code), out[:limit], err[:limit], seconds)  # type: ignore[arg-type]
