"""The job API over a directory of runs, with a dashboard.

Jobs run as processes here, or (--job-template) as Kubernetes Jobs; they go on when the server ends, and the next one
finds them.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

HELP = "serve the job API and the dashboard"
EXAMPLE = "rlhf-orchestrate serve --runs runs --max-running 2"


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="directory of runs (default: runs)")
    parser.add_argument("--data-root", type=Path, action="append", help="where jobs' data is (default: .); repeatable")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8080, help="port to listen on (default: 8080)")
    parser.add_argument(
        "--tokens", type=Path, help="file of lines `name read|write token` (default: runs/.token, made here)"
    )
    parser.add_argument("--defaults", type=Path, help="TOML (or *.json) that lies under every job")
    parser.add_argument("--max-running", type=int, default=1, help="jobs at a time, the others wait (default: 1)")
    parser.add_argument("--job-template", type=Path, help="Kubernetes Job manifest: run orchestrators as such Jobs")
    parser.add_argument(
        "--stores-secret", default="", help="Secret of the stores' credentials, for which each such Job gets its own"
    )
    parser.add_argument("--release", default="", help="with --job-template: tells its runs from others in the exchange")
    parser.add_argument("--lease", default="", help="Lease whose holder, of several servers, starts jobs")
    parser.add_argument("--stores-role", default="", help="ARN of S3's role for credentials of one job's prefix")


def execute(given: Namespace) -> int:
    from orchestrator.api.server import ServeOptions, serve  # `serve --help` need not wait for FastAPI

    roots = tuple(given.data_root or [Path(".")])
    serve(
        ServeOptions(
            given.runs, roots, given.host, given.port, given.tokens, given.defaults, given.max_running,
            given.job_template, given.stores_secret, given.stores_role, given.lease, given.release,
        )
    )  # fmt: skip
    return 0
