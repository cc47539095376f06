"""Real servers: `rlhf-orchestrate serve` in processes of their own, and runs written as an orchestrator writes them."""

from __future__ import annotations

import json
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.commands.main import main
from orchestrator.job.config import parse_job
from orchestrator.platforms.base import FunctionSpec, Usage
from orchestrator.run.directory import RunDirectory
from orchestrator.run.events import EventLog
from orchestrator.run.ledger import Ledger
from tests.support.forked import Forked, run_command
from tests.support.tiny_job import ENV, make_model

WRITE, READ = "write-token-0123456789", "read-token-0123456789"
JOB = {
    "name": "small", "steps": 3, "model": {"path": "model"}, "data": {"train": "train.jsonl"},
    "validation": {"every": 0}, "rollout": {"max_response_length": 8},
}  # fmt: skip


@dataclass
class Served:
    url: str
    process: Forked
    runs: Path
    log: Path

    def client(self, token: str = WRITE) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {token}"}, timeout=100)


def _run(files: int | None, told: list[str], log: str) -> None:
    if files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    run_command(main, told, dict(ENV), log, log)


@contextmanager
def serving(
    runs: Path, root: Path, *words: str, max_running: int = 0, port: int | None = None, own_token: bool = False,
    files: int | None = None,
) -> Iterator[Served]:  # fmt: skip
    """A server until the block ends (unless it was killed before); the jobs that it started are not its children.

    It takes WRITE and READ, or (`own_token`) what it has made itself. `files`: so many may it have open.
    """
    tokens = runs.with_name("tokens")
    tokens.parent.mkdir(parents=True, exist_ok=True)
    tokens.write_text(f"# who may\nci write {WRITE}\ndashboard read {READ}\n")
    words = words if own_token else (*words, "--tokens", str(tokens))
    port = port or free_port()
    log = runs.with_name(f"{runs.name}-{port}.log")
    told = ["serve", "--runs", str(runs), "--data-root", str(root), "--port", str(port), *words]
    told += ["--max-running", str(max_running)]
    process = Forked(_run, files, told, str(log), daemon=False)
    try:
        wait_for(lambda: process.poll() is not None or answers(port), what=f"server on {port}")
        assert process.poll() is None, log.read_text()
        yield Served(f"http://127.0.0.1:{port}", process, runs, log)
    finally:
        process.terminate()
        process.wait(100)


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def answers(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_for(condition: Callable[[], Any], *, what: str, timeout_s: float = 200) -> Any:
    """What the condition gives as soon as it gives something."""
    give_up_s = time.monotonic() + timeout_s
    while True:
        asked_s = time.monotonic()
        if found := condition():
            return found
        assert asked_s < give_up_s, f"never came: {what}"
        time.sleep(max(0.02, 4 * (time.monotonic() - asked_s)))


def parse_stream(text: str) -> list[dict[str, Any]]:
    """Server-sent events, comments left out."""
    events = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            data = json.loads(fields["data"])
            assert (fields["id"], fields["event"]) == (str(data["id"]), data["type"])
            events.append(data)
    return events


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root; most jobs of these tests name files in it that nothing but their check reads."""
    root = tmp_path_factory.mktemp("data")
    make_model(root / "model")
    (root / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (root / "away").symlink_to("/etc")
    return root


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """A directory of runs with one that has finished: `done`, three steps, two samples each."""
    runs = tmp_path_factory.mktemp("served") / "runs"
    write_run(runs / "done", root, finished=True)
    return runs


def write_run(path: Path, root: Path, *, finished: bool, steps: int = 3) -> None:
    table = JOB | {"name": path.name, "steps": steps, "checkpoints": {"keep": 1}}
    table |= {"reward": {"score": "https://user:hunter2@scorer/?api_key=s3cr3t"}}
    RunDirectory.create(path, parse_job(table, base=root))
    log = EventLog(path)
    log.append("started", {"execution": 1, "step": -1, "steps": steps})
    ledger = Ledger(path / "cost.json", [FunctionSpec("train", "train", usd_per_hour=3600)], next_step=0, now_s=0.0)
    (path / "samples").mkdir()
    lines = []
    for step in range(steps + 1):
        ledger.close_step(step, [Usage("train", "r", 0.0, None, float(step))], float(step + 1))
        lines.append(json.dumps({"step": step, "actor/kl": step / 10, **({"critic/score/mean": 0.5} if step else {})}))
        versions = {"actor": {"model": "actor", "number": step, "call": f"c{step}"}}
        log.tell("step", step, {"metrics": {"critic/score/mean": 0.5}, "cost_usd": float(step), "versions": versions})
        if step:
            texts = [
                {
                    "group": 0,
                    "index": i,
                    "prompt": "1+1=",
                    "response": f"{step + i}",
                    "score": float(i),
                    "tokens": 2 - i,
                }
                for i in range(2)
            ]
            (path / "samples" / f"{step:06d}.jsonl").write_text("".join(json.dumps(t) + "\n" for t in texts))
    (path / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    if finished:
        (path / "model").mkdir()
        log.append("finished", {"model": "model"})
    log.close()


@pytest.fixture(scope="session")
def served(runs: Path, root: Path) -> Iterator[Served]:
    """A server that starts no jobs: what is submitted waits."""
    with serving(runs, root) as server:
        yield server


@pytest.fixture
def api(served: Served) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client
