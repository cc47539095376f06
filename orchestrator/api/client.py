"""`rlhf-orchestrate submit`: posts a job and follows its events over breaks of the connection."""

from __future__ import annotations

import json
import os
import time
import tomllib
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import tomli_w

from functions.base.wire import Json
from orchestrator.base.errors import ConfigError, OrchestratorError, RunError
from orchestrator.job.config import apply_override
from orchestrator.session.terminal_view import dollars

TOKEN = "RLHF_TOKEN"
AGAIN_S = 0.5
GIVE_UP_S = 300.0
"""How long a server may be away before following ends."""


class Refused(OrchestratorError):
    """The server has answered with a problem."""


def submit(
    path: Path,
    overrides: Sequence[str],
    *,
    url: str,
    token_file: Path | None,
    key: str | None,
    follow: bool,
    upload: bool = False,
) -> int:
    """The command's exit code: 0 when the job was taken, or (`follow`) when it has succeeded.

    Raises ConfigError for the job file, Refused with the server's lines, RunError where no server answers.
    """
    table = read_table(path, overrides)
    headers = {"Content-Type": "application/toml", "Idempotency-Key": key or str(uuid.uuid4())}
    with httpx.Client(base_url=url, headers=token_headers(token_file), timeout=30) as client:
        if upload:
            from orchestrator.api.upload import send_files  # it needs `check` of this module

            send_files(client, table, path.parent)
        job = _post(client, tomli_w.dumps(table).encode(), headers)
        print(f"job {job['id']}: {url.rstrip('/')}/v1/jobs/{job['id']}")
        if not follow:
            return 0
        last: Json = {}
        for event in events(client, job["id"]):
            last = event
            line = told(event)
            if line:
                print(line, flush=True)
    return 0 if last.get("type") == "finished" else 1


def read_table(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The job file with the overrides, as it is: the server resolves and checks it."""
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    for override in overrides:
        apply_override(table, override)
    return table


def token_headers(file: Path | None) -> dict[str, str]:
    """The Authorization header by the file, or by the environment. Raises ConfigError."""
    try:
        token = os.environ.get(TOKEN, "") if file is None else file.read_text()
    except OSError as error:
        raise ConfigError(f"--token-file {file}: cannot be read: {error.strerror}") from error
    return {"Authorization": f"Bearer {token.strip()}"} if token.strip() else {}


def _post(client: httpx.Client, body: bytes, headers: dict[str, str]) -> Json:
    """With an Idempotency-Key a request whose answer was lost can be sent again."""
    failure: httpx.TransportError | None = None
    for _ in range(3):
        try:
            response = client.post("/v1/jobs", content=body, headers=headers)
        except httpx.ConnectError as error:
            raise RunError(f"{client.base_url}: no server answers ({error})") from error
        except httpx.TransportError as error:
            failure = error
            continue
        check(response)
        job: Json = response.json()
        return job
    raise RunError(f"{client.base_url}: the server does not answer ({failure})")


def check(response: httpx.Response) -> None:
    """Raises Refused for a problem."""
    if response.is_success:
        return
    response.read()
    try:
        problem = response.json()
        lines = problem["errors"] or [problem["detail"]]
    except (ValueError, KeyError, TypeError):
        lines = [response.text[:200]]
    raise Refused("\n".join(f"{response.url.host} ({response.status_code}): {line}" for line in lines))


def events(client: httpx.Client, job: str) -> Iterator[Json]:
    """The job's events, each once, until nothing more will come. Raises Refused; RunError for a server that is away."""
    seen = 0
    heard_s = time.monotonic()
    while True:
        try:
            with client.stream("GET", f"/v1/jobs/{job}/events", headers={"Last-Event-ID": str(seen)}) as response:
                check(response)
                if response.status_code == 204:
                    return
                for line in response.iter_lines():
                    heard_s = time.monotonic()
                    if line.startswith("data:"):
                        event = json.loads(line.removeprefix("data:"))
                        seen = event["id"]
                        yield event
        except httpx.TransportError as error:
            if time.monotonic() - heard_s > GIVE_UP_S:
                raise RunError(f"{client.base_url}: the server is away ({error}); job {job} goes on") from None
        time.sleep(AGAIN_S)


def told(event: Json) -> str:
    """One line for a person; "" for what is not worth one."""
    data = event["data"]
    match event["type"]:
        case "started":
            return f"started (execution {data['execution']}), {data['steps']} steps"
        case "step":
            metrics = data["metrics"]
            reward = f"  reward {metrics['critic/score/mean']:.3f}" if "critic/score/mean" in metrics else ""
            return f"step {data['step']}{reward}  {dollars(data['cost_usd'])}"
        case "validation":
            return "  ".join(f"{name} {value:.3f}" for name, value in data["metrics"].items() if "/acc/" in name)
        case "sample_failures":
            return f"step {data['step']}: {data['count']} samples dropped, their scorer failed: {data['first'][0]}"
        case "stage":
            return ""
        case kind:
            return f"{kind}{': ' if 'message' in data else ''}{data.get('message', '')}"
