"""`rlhf-orchestrate serve`, `submit`, `top` and `report`: arguments in, exit code out."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

SERVE = """The job API over a directory of runs. Jobs run as processes here, or (--job-template) as Kubernetes Jobs;
they go on when the server ends, and the next one finds them."""
SUBMIT = """Sends a job to a server of `rlhf-orchestrate serve`. Paths in the job are the server's, or with --upload
the files are sent along.
The token comes from --token-file or $RLHF_TOKEN."""


def serve_parser(commands: Any) -> None:
    parser = commands.add_parser("serve", help="serve the job API", description=SERVE)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="directory of runs (default: runs)")
    parser.add_argument("--data-root", type=Path, action="append", help="where jobs' data is (default: .); repeatable")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--tokens", type=Path, help="file of lines `name read|write token`")
    parser.add_argument("--defaults", type=Path, help="TOML (or *.json) that lies under every job")
    parser.add_argument("--max-running", type=int, default=1, help="jobs at a time, the others wait (default: 1)")
    parser.add_argument("--job-template", type=Path, help="Kubernetes Job manifest: run orchestrators as such Jobs")
    parser.set_defaults(command=_serve)


def submit_parser(commands: Any) -> None:
    parser = commands.add_parser("submit", help="send a job to a server", description=SUBMIT)
    parser.add_argument("job", type=Path, help="job file (TOML)")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings over those of the file")
    _server(parser)
    parser.add_argument(
        "--upload", action="store_true", help="send the files that the job names (relative to it) along"
    )
    parser.add_argument("--idempotency-key", help="a repeated submit with the same key makes no second job")
    parser.add_argument("--follow", action="store_true", help="print what happens until the job ends")
    parser.set_defaults(command=_submit)


def top_parser(commands: Any) -> None:
    parser = commands.add_parser("top", help="the jobs of a server, live")
    _server(parser)
    parser.set_defaults(command=_top)


def report_parser(commands: Any) -> None:
    parser = commands.add_parser("report", help="a run as one HTML file: the dashboard's pictures, without a server")
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("-o", "--output", type=Path, help="file to write (default: RUN/report.html)")
    parser.set_defaults(command=_report)


def _server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="the server (default: http://127.0.0.1:8080)")
    parser.add_argument("--token-file", type=Path, help="file that holds the token (default: $RLHF_TOKEN)")


def _serve(given: argparse.Namespace) -> int:
    from orchestrator.api.server import ServeOptions, serve  # FastAPI is half of a second that `status` need not wait

    roots = tuple(given.data_root or [Path(".")])
    serve(
        ServeOptions(
            given.runs, roots, given.host, given.port, given.tokens, given.defaults, given.max_running,
            given.job_template,
        )
    )  # fmt: skip
    return 0


def _submit(given: argparse.Namespace) -> int:
    from orchestrator.api.client import submit

    return submit(
        given.job, given.overrides, url=given.url, token_file=given.token_file, key=given.idempotency_key,
        follow=given.follow, upload=given.upload,
    )  # fmt: skip


def _top(given: argparse.Namespace) -> int:
    import httpx
    from rich.console import Console

    from orchestrator.api.client import token_headers
    from orchestrator.commands.top import top

    with httpx.Client(base_url=given.url, headers=token_headers(given.token_file), timeout=10) as client:
        top(client, Console())
    return 0


def _report(given: argparse.Namespace) -> int:
    from orchestrator.api.report import write_report

    file = write_report(given.run, given.output)
    print(f"{file}: {file.stat().st_size / 1e6:.1f} MB")
    return 0
