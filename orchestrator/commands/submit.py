"""Sends a job to a server of `rlhf-orchestrate serve`.

Paths in the job are relative to its file, as in `run`, where the server is on this machine (they have to lie in its
data root); elsewhere they are the server's, or with --upload the files are sent along. The token comes from
--token-file, from $RLHF_TOKEN, or from runs/.token where a server of this machine keeps it.
"""

import uuid
from argparse import ArgumentParser, Namespace
from urllib.parse import urlsplit

import httpx
import tomli_w

from functions.base.wire import Json
from orchestrator.api.client import events, post_job, token_headers
from orchestrator.api.same_origin import is_loopback
from orchestrator.api.upload import name_absolutely, send_files
from orchestrator.commands.arguments import job_file, server
from orchestrator.job.config import read_table
from orchestrator.session.terminal_view import dollars
from orchestrator.telemetry.headline import HEADLINES, headline
from orchestrator.telemetry.validation import validation_names

HELP = "send a job to a server"
EXAMPLE = "rlhf-orchestrate submit examples/arithmetic/job.toml --follow"


def arguments(parser: ArgumentParser) -> None:
    job_file(parser)
    server(parser)
    parser.add_argument(
        "--upload", action="store_true", help="send the files that the job names (relative to it) along"
    )
    parser.add_argument("--idempotency-key", help="a repeated submit with the same key makes no second job")
    parser.add_argument("--follow", action="store_true", help="print what happens until the job ends")


def execute(given: Namespace) -> int:
    """0 when the job was taken, or (--follow) when it has succeeded."""
    table = read_table(given.job, given.overrides)  # as it is: the server resolves and checks it
    headers = {"Content-Type": "application/toml", "Idempotency-Key": given.idempotency_key or str(uuid.uuid4())}
    token = token_headers(given.token_file, given.url)
    with httpx.Client(base_url=given.url, headers=token, timeout=30) as client:
        if given.upload:
            send_files(client, table, given.job.parent)
        elif is_loopback(urlsplit(given.url).hostname or ""):
            name_absolutely(table, given.job.parent)
        job = post_job(client, tomli_w.dumps(table).encode(), headers)
        print(f"job {job['id']}: {given.url.rstrip('/')}/v1/jobs/{job['id']}")
        if not given.follow:
            return 0
        last: Json = {}
        for last in events(client, job["id"]):
            if line := event_line(last):
                print(line, flush=True)
    return 0 if last.get("type") == "finished" else 1


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
