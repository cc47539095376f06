"""Looking at who holds a run never keeps an orchestrator from taking it; two servers on one directory of runs."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.api.jobs import Jobs
from orchestrator.api.quota import UNLIMITED
from orchestrator.base.errors import RunError
from orchestrator.job.config import parse_job
from orchestrator.run.directory import RunDirectory
from tests.api.conftest import JOB
from tests.api.test_quota import Orchestrators

LOOK = "import sys; from pathlib import Path; from orchestrator.run.directory import RunDirectory as R\n"
LOOK += "print(1, flush=True)\nwhile True: R(Path(sys.argv[1])).holder()\n"


def test_a_run_that_is_looked_at_all_the_time_can_be_taken(tmp_path: Path, root: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run", parse_job(JOB, base=root))
    directory.lock().close()
    looker = subprocess.Popen([sys.executable, "-c", LOOK, str(directory.path)], stdout=subprocess.PIPE)
    try:
        assert looker.stdout is not None
        looker.stdout.readline()
        for _ in range(5000):
            directory.lock().close()
        with directory.lock(), pytest.raises(RunError, match="another orchestrator"):
            directory.lock()
    finally:
        looker.kill()
        looker.communicate()


class Slow(Orchestrators):
    """Says who is alive only when a job has been started since, or after a while."""

    def __init__(self) -> None:
        super().__init__()
        self.started = threading.Event()
        self.starts: list[str] = []

    def start(self, job: str, launch: int) -> None:
        super().start(job, launch)
        self.starts.append(job)
        self.started.set()

    def alive(self, jobs: Iterable[str]) -> frozenset[str]:
        found = super().alive(jobs)
        self.started.wait(0.2)
        return found


def two(runs: Path, launcher: Orchestrators) -> list[Jobs]:
    launcher.runs = runs
    return [Jobs(runs, launcher, max_running=2, quota=lambda name: UNLIMITED) for _ in range(2)]


def test_two_servers_start_a_job_once(tmp_path: Path, root: Path) -> None:
    launcher = Slow()
    servers = two(tmp_path / "runs", launcher)
    id = servers[0].submit(parse_job(JOB, base=root), key=None, body=b"", owner="")[0].id
    with ThreadPoolExecutor() as pool:
        for one in [pool.submit(server.tick) for server in servers]:
            one.result()
    assert launcher.starts == [id]


def test_what_one_server_was_told_the_other_knows(tmp_path: Path, root: Path) -> None:
    launcher = Orchestrators()
    one, other = two(tmp_path / "runs", launcher)
    config = parse_job(JOB, base=root)
    waits, runs = (one.submit(config, key=None, body=b"", owner="")[0].id for _ in range(2))
    assert other.get(waits).state == "queued"
    other.cancel(waits)
    assert one.get(waits).state == "cancelled"
    one.tick()
    assert launcher.at_work == [runs]
    other.cancel(runs)  # it has not looked since that was started
    assert launcher.at_work == []
    one.tick()
    assert one.get(runs).settled
    one.delete(runs)
    assert [job.id for job in other.all()] == [waits]
