"""`top` of a server, `logs` of a run."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from orchestrator.config import parse_job
from orchestrator.errors import RunError
from orchestrator.logs import read_logs
from orchestrator.run_directory import RunDirectory
from tests.api.conftest import JOB, WRITE, serving, write_run
from tests.support.tiny_job import command


def test_top_without_a_terminal_is_one_table(tmp_path: Path, root: Path) -> None:
    write_run(tmp_path / "runs" / "done", root, finished=True)
    (tmp_path / "token").write_text(WRITE)
    with serving(tmp_path / "runs", root) as server, server.client() as api:
        id = api.post("/v1/jobs", json=JOB).json()["id"]
        done = command("top", "--url", server.url, "--token-file", tmp_path / "token")
        assert done.returncode == 0, done.stderr
        rows = [line.split() for line in done.stdout.splitlines() if line.split()[:1] in (["done"], [id])]
        assert rows[0] == [id, "queued", "-/3", "-", "-", "-"], "those that have not ended come first"
        assert rows[1][:5] == ["done", "succeeded", "3/3", "0.500", "$3.00"]
        assert "send `Authorization" in command("top", "--url", server.url).stderr


@pytest.fixture
def run(tmp_path: Path, root: Path) -> RunDirectory:
    directory = RunDirectory.create(tmp_path / "run", parse_job(JOB, base=root))
    (directory.path / "logs").mkdir()
    for name, text in (("generate-0", "a\nb\n"), ("generate-10", "c"), ("train-critic-0", "d\n")):
        (directory.path / "logs" / f"{name}.log").write_text(text)
        time.sleep(0.01)
    return directory


def test_logs_of_all_replicas_or_of_one_function(run: RunDirectory) -> None:
    every = list(read_logs(run, None, follow=False))
    assert every == [("generate-0", "a"), ("generate-0", "b"), ("generate-10", "c"), ("train-critic-0", "d")]
    assert list(read_logs(run, "train-critic", follow=True)) == [("train-critic-0", "d")]
    with pytest.raises(RunError, match=r"no logs of 'train' \(there are generate, train-critic\)"):
        list(read_logs(run, "train", follow=False))


def test_logs_follow_while_the_run_is_worked_on(run: RunDirectory) -> None:
    found: list[tuple[str, str]] = []
    lock = run.lock()
    follower = threading.Thread(target=lambda: found.extend(read_logs(run, "generate", follow=True)))
    follower.start()
    time.sleep(0.3)
    with (run.path / "logs" / "generate-10.log").open("a") as file:
        file.write(" goes on\n")
    (run.path / "logs" / "generate-11.log").write_text("new")
    lock.close()
    follower.join(10)
    assert found == [("generate-0", "a"), ("generate-0", "b"), ("generate-10", "c goes on"), ("generate-11", "new")]


def test_logs_of_a_run_on_a_cluster_are_the_clusters(tmp_path: Path, root: Path) -> None:
    table = JOB | {"platform": {"kind": "knative", "knative": {"image": "i"}}, "exchange": {"url": "redis://r:6379"}}
    directory = RunDirectory.create(tmp_path / "run", parse_job(table, base=root))
    with pytest.raises(RunError, match="kubectl logs -l rlhf-orchestrate/job=small,rlhf-orchestrate/function=train -c"):
        list(read_logs(directory, "train", follow=True))
