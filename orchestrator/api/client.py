"""The API's client: posts a job and follows its events over breaks of the connection."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from functions.base.wire import Json
from orchestrator.api.auth import OWN, read_token
from orchestrator.api.same_origin import is_loopback
from orchestrator.base.errors import ConfigError, OrchestratorError, RunError

TOKEN = "RLHF_TOKEN"
AGAIN_S = 0.5
GIVE_UP_S = 300.0
"""How long a server may be away before following ends."""


class Refused(OrchestratorError):
    """The server has answered with a problem."""


def token_headers(file: Path | None, url: str) -> dict[str, str]:
    """The Authorization header by the file, by the environment, or, for a server on this machine, by the file that it
    keeps in `./runs`. Raises ConfigError."""
    token = "" if file is not None else os.environ.get(TOKEN, "").strip()
    own = Path("runs", OWN)
    if file is None and not token and is_loopback(urlsplit(url).hostname or "") and own.exists():
        file = own
    try:
        token = token if file is None else read_token(file)
    except OSError as error:
        raise ConfigError(f"--token-file {file}: cannot be read: {error.strerror}") from error
    return {"Authorization": f"Bearer {token}"} if token else {}


def post_job(client: httpx.Client, body: bytes, headers: dict[str, str]) -> Json:
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
