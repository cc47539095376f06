"""The jobs of a server, live on a terminal, once elsewhere."""

import time
from argparse import ArgumentParser, Namespace
from typing import Any

import httpx
from rich.box import SIMPLE
from rich.console import Console
from rich.live import Live
from rich.table import Table

from orchestrator.api.client import check, token_headers
from orchestrator.base.errors import RunError
from orchestrator.commands.arguments import json_output, print_json, server
from orchestrator.session.terminal_view import duration, spending
from orchestrator.telemetry.headline import HEADLINES, headline

HELP = "the jobs of a server, live"
EXAMPLE = "rlhf-orchestrate top --json"
EVERY_S = 1.0
SHOWN = 50
ASKED = 1000
COLORS = {
    "running": "green", "queued": "yellow", "interrupted": "yellow", "succeeded": "dim", "failed": "red",
    "cancelled": "dim",
}  # fmt: skip


def arguments(parser: ArgumentParser) -> None:
    server(parser)
    json_output(parser)


def execute(given: Namespace) -> int:
    with httpx.Client(base_url=given.url, headers=token_headers(given.token_file, given.url), timeout=10) as client:
        if given.json:
            print_json(_jobs(client))
        else:
            top(client, Console())
    return 0


def top(client: httpx.Client, console: Console) -> None:
    """Until Ctrl-C on a terminal. Raises RunError where no server answers, Refused where it refuses."""
    if not console.is_terminal:
        console.print(table(_jobs(client)))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(table(_jobs(client)), refresh=True)
            try:
                time.sleep(EVERY_S)
            except KeyboardInterrupt:
                return


def _jobs(client: httpx.Client) -> list[dict[str, Any]]:
    try:
        response = client.get("/v1/jobs", params={"limit": ASKED})
    except httpx.TransportError as error:
        raise RunError(f"{client.base_url}: no server answers ({error})") from error
    check(response)
    jobs: list[dict[str, Any]] = response.json()["jobs"]
    return jobs


def table(jobs: list[dict[str, Any]]) -> Table:
    """The first of the jobs as the API lists them; those that have not ended come first."""
    shown = Table(box=SIMPLE)
    for title, justify in (("job", "left"), ("state", "left"), ("step", "right"), ("learns", "right"),
                           ("cost", "right"), ("time", "right"), ("now", "left")):  # fmt: skip
        shown.add_column(title, justify="right" if justify == "right" else "left", no_wrap=title != "now")
    for job in sorted(jobs, key=lambda job: job["ended_at"] is not None)[:SHOWN]:
        followed = headline(job["metrics"])
        spent, usd = job["spent_replica_s"], job["spent_usd"]
        usd = job["cost_usd"] if usd is None else usd
        replicas = " ".join(f"{name} {count}" for name, count in job["replicas"].items() if count)
        shown.add_row(
            job["id"],
            job["state"],
            f"{'-' if job['step'] is None else job['step']}/{job['steps']}",
            "-" if followed is None else f"{HEADLINES[followed]} {job['metrics'][followed]:.3f}",
            "-" if spent is None and not usd else spending(usd, spent or 0.0),
            "-" if job["wall_s"] is None else duration(job["wall_s"]),
            job["message"] or replicas,
            style=COLORS[job["state"]],
        )
    return shown
