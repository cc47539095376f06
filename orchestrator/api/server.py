"""`rlhf-orchestrate serve`: the parts put together, and uvicorn around them."""

import json
import os
import tomllib
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from functions.base.http_limits import limited_server
from functions.base.logs import About, log_lines
from functions.server.forkserver_client import FORKSERVER, keep
from orchestrator.api.app import create_app
from orchestrator.api.auth import Tokens, own_token, read_token
from orchestrator.api.jobs import Jobs
from orchestrator.api.kept import LocalRuns, StoredRuns
from orchestrator.api.launch import Alone, Launcher, LocalLauncher
from orchestrator.api.routes import Site
from orchestrator.api.same_origin import is_loopback
from orchestrator.base.errors import ConfigError
from orchestrator.job.config import JobConfig
from orchestrator.run.stored import FILES, open_runs


@dataclass(frozen=True)
class ServeOptions:
    runs: Path
    data_roots: tuple[Path, ...]
    host: str = "127.0.0.1"
    port: int = 8080
    tokens: Path | None = None
    """None: one of its own, in the directory of runs (auth.py); on loopback only."""
    defaults: Path | None = None
    """TOML, or JSON (*.json), that lies under every job: its exchange, its platform, its functions' machines."""
    max_running: int = 1
    """Jobs that run at a time; the others wait. 0: none is started."""
    job_template: Path | None = None
    """A Kubernetes Job manifest: orchestrators run as such Jobs, and runs are kept in the exchange of `defaults`. None:
    as processes here, on this very directory of runs."""
    stores_secret: str = ""
    """The Secret of the stores' credentials, in whose place each of those Jobs gets one of its own."""
    stores_role: str = ""
    """Of S3, for credentials of a job's prefix."""
    lease: str = ""
    """Of several servers of a release its holder starts jobs; "": this one does."""
    release: str = ""
    """Tells its runs from those of others in the same exchange."""


def build(options: ServeOptions) -> FastAPI:
    """Raises ConfigError or RunError, one line."""
    if options.tokens is None and not is_loopback(options.host):
        raise ConfigError(f"--host {options.host}: is open to others; --tokens FILE says who may use it")
    roots = []
    for root in options.data_roots:
        if not root.is_dir():
            raise ConfigError(f"--data-root {root}: no such directory")
        roots.append(root.resolve())
    runs = options.runs.resolve()
    defaults = {} if options.defaults is None else read_table(options.defaults)
    if options.job_template is not None and (defaults.get("platform") or {}).get("kind") != "knative":
        raise ConfigError('--job-template: its jobs run on a cluster; --defaults has to say platform.kind = "knative"')
    launcher: Launcher
    kept, leads = LocalRuns(runs), Alone()
    if options.job_template is None:
        launcher = LocalLauncher(runs)
    else:
        from orchestrator.api.launch_kubernetes import KubernetesLauncher

        exchange = (defaults.get("exchange") or {}).get("url") or ""
        if "://" not in exchange:
            raise ConfigError(
                "--job-template: its jobs run on a cluster; --defaults has to say exchange.url, of a store"
            )
        place = f"{exchange}#{options.release}"
        launcher = KubernetesLauncher.connect(
            runs, options.job_template, place, options.stores_secret, options.stores_role
        )
        kept = StoredRuns(runs, open_runs(place))
        leads = launcher.election(options.lease) if options.lease else leads
    tokens = Tokens(options.tokens or own_token(runs))
    site = Site([*roots, runs / FILES], defaults, here=options.job_template is None)
    jobs = Jobs(runs, launcher, max_running=options.max_running, quota=tokens.quota, kept=kept, leads=leads)
    return create_app(jobs, site, tokens, loopback=is_loopback(options.host))


def serve(options: ServeOptions) -> None:
    """Until SIGINT or SIGTERM. Jobs that run go on, and the next server finds them."""
    app = build(options)
    log_lines(About({"function": "api"}))
    address = f"http://{options.host}:{options.port}"
    token = "" if options.tokens is not None else f"#token={read_token(own_token(options.runs.resolve()))}"
    print(f"dashboard: {address}/{token}\njob API:   {address}/openapi.json", flush=True)
    with ExitStack() as stack:
        if options.job_template is None and FORKSERVER not in os.environ:  # which its jobs inherit
            os.environ[FORKSERVER] = stack.enter_context(keep(os.environ))
        limited_server(app, host=options.host, port=options.port, timeout_graceful_shutdown=3).run()


def read_table(path: Path) -> dict[str, Any]:
    """Raises ConfigError."""
    try:
        text = path.read_text()
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    unknown = sorted(set(table) - set(JobConfig.model_fields)) if isinstance(table, dict) else ["not a table"]
    if unknown:
        raise ConfigError(f"{path}: no keys of a job: {', '.join(unknown)}")
    return dict(table)
