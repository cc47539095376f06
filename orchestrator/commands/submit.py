"""Sends a job to a server of `rlhf-orchestrate serve`.

Paths in the job are relative to its file, as in `run`, where the server is on this machine (they have to lie in its
data root); elsewhere they are the server's, or with --upload the files are sent along. The token comes from
--token-file, from $RLHF_TOKEN, or from runs/.token where a server of this machine keeps it.
"""

import tomllib
import uuid
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import tomli_w

from functions.base.wire import Json
from orchestrator.api.client import events, post_job, token_headers
from orchestrator.api.upload import name_absolutely, send_files
from orchestrator.base.errors import ConfigError
from orchestrator.commands.arguments import job_file, server
from orchestrator.job.config import apply_override
from orchestrator.session.terminal_view import dollars
from orchestrator.telemetry.headline import HEADLINES, headline
from orchestrator.telemetry.validation import validation_names

HELP = "send a job to a server"
EXAMPLE = "rlhf-orchestrate submit examples/arithmetic/job.toml --follow"

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def arguments(parser: ArgumentParser) -> None:
    job_file(parser)
    server(parser)
    parser.add_argument(
        "--upload", action="store_true", help="send the files that the job names (relative to it) along"
    )
    parser.add_argument("--idempotency-key", help="a repeated submit with the same key makes no second job")
    parser.add_argument("--follow", action="store_true", help="print what happens until the job ends")


def execute(given: Namespace) -> int:
    return submit(
        given.job, given.overrides, url=given.url, token_file=given.token_file, key=given.idempotency_key,
        follow=given.follow, upload=given.upload,
    )  # fmt: skip


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
    with httpx.Client(base_url=url, headers=token_headers(token_file, url), timeout=30) as client:
        if upload:
            send_files(client, table, path.parent)
        elif urlsplit(url).hostname in LOOPBACK:
            name_absolutely(table, path.parent)
        job = post_job(client, tomli_w.dumps(table).encode(), headers)
        print(f"job {job['id']}: {url.rstrip('/')}/v1/jobs/{job['id']}")
        if not follow:
            return 0
        last: Json = {}
        for event in events(client, job["id"]):
            last = event
            line = event_line(event)
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


def event_line(event: Json) -> str:
    """One line for a person; "" for what is not worth one."""
    data = event["data"]
    match event["type"]:
        case "started":
            return f"started (execution {data['execution']}), {data['steps']} steps"
        case "step":
            metrics = data["metrics"]
            name = headline(metrics)
            learns = "" if name is None else f"  {HEADLINES[name]} {metrics[name]:.3f}"
            return f"step {data['step']}{learns}" + (f"  {dollars(data['cost_usd'])}" if data["cost_usd"] else "")
        case "validation":
            metrics = data["metrics"]
            return "  ".join(f"{name} {metrics[name]:.3f}" for name in validation_names(metrics))
        case "sample_failures":
            return f"step {data['step']}: {data['count']} samples dropped, their scorer failed: {data['first'][0]}"
        case "stage":
            return ""
        case kind:
            return f"{kind}{': ' if 'message' in data else ''}{data.get('message', '')}"
