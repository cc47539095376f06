"""`top` of a server, `logs` of a run."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from orchestrator.base.errors import RunError
from orchestrator.commands.logs import Wanted, read_logs
from orchestrator.job.config import parse_job
from orchestrator.run.directory import RunDirectory
from tests.api.conftest import JOB, WRITE, serving, write_run
from tests.support.tiny_job import command, here, make_job
from tests.support.waiting import until


def test_top_without_a_terminal_is_one_table(tmp_path: Path, root: Path) -> None:
    write_run(tmp_path / "runs" / "done", root, finished=True)
    (tmp_path / "token").write_text(WRITE)
    with serving(tmp_path / "runs", root) as server, server.client() as api:
        id = api.post("/v1/jobs", json=JOB).json()["id"]
        done = here("top", "--url", server.url, "--token-file", tmp_path / "token")
        assert done.returncode == 0, done.stderr
        rows = [line.split() for line in done.stdout.splitlines() if line.split()[:1] in (["done"], [id])]
        assert rows[0] == [id, "queued", "-/3", "-", "-", "-"], "those that have not ended come first"
        assert rows[1][:6] == ["done", "succeeded", "3/3", "reward", "0.500", "$3.00"]
        assert "send `Authorization" in here("top", "--url", server.url).stderr


def logged(at: int, message: str, **more: object) -> str:
    about = {"time": f"2026-11-21T14:02:{at:02d}.000Z", "level": "info", "message": message}
    return json.dumps({**about, **more}) + "\n"


@pytest.fixture
def run(tmp_path: Path, root: Path) -> RunDirectory:
    directory = RunDirectory.create(tmp_path / "run", parse_job(JOB, base=root))
    (directory.path / "logs").mkdir()
    first = {"step": 1, "call": "s000001.generate.a1"}
    for name, text in (
        ("generate-0", logged(1, "begins", **first) + "from C\n" + logged(4, "slow", level="warning", **first)),
        (
            "generate-10",
            logged(2, "idle") + logged(5, "line\u2028one", level="error", exception="Traceback\nE: x", step=2),
        ),
        ("train-critic-0", logged(3, "trains", step=1, call="s000001.train-critic.b2")),
    ):
        (directory.path / "logs" / f"{name}.log").write_text(text)
    return directory


def read(run: RunDirectory, *, follow: bool = False, **wanted: Any) -> list[tuple[str, str]]:
    return [(replica, line.message) for replica, line in read_logs(run, Wanted(**wanted), follow=follow)]


def test_logs_of_all_replicas_in_the_order_of_their_times(run: RunDirectory) -> None:
    assert read(run) == [
        ("generate-0", "begins"), ("generate-0", "from C"), ("generate-10", "idle"), ("train-critic-0", "trains"),
        ("generate-0", "slow"), ("generate-10", "line\u2028one"),
    ]  # fmt: skip
    assert read(run, function="train-critic", follow=True) == [("train-critic-0", "trains")]
    with pytest.raises(RunError, match=r"no logs of 'train' \(there are generate, train-critic\)"):
        read(run, function="train")


@pytest.mark.parametrize(
    ("wanted", "messages"),
    [
        ({"step": 1}, ["begins", "trains", "slow"]),
        ({"step": 1, "function": "generate"}, ["begins", "slow"]),
        ({"call": "s000001.train"}, ["trains"]),
        ({"level": "warning"}, ["slow", "line\u2028one"]),
        ({"level": "error", "step": 1}, []),
        ({"level": "info", "function": "generate"}, ["begins", "from C", "idle", "slow", "line\u2028one"]),
    ],
)
def test_only_what_is_asked_for(run: RunDirectory, wanted: dict[str, Any], messages: list[str]) -> None:
    assert [message for _, message in read(run, **wanted)] == messages


def test_logs_for_people(run: RunDirectory) -> None:
    done = here("logs", run.path, "--function", "generate", "--level", "warning")
    assert done.stdout.splitlines()[0] == "generate-0 | 14:02:04  warning  step 1  call s000001.generate.a1  slow"
    assert done.stdout.splitlines()[-2:] == ["generate-10 | Traceback", "generate-10 | E: x"]
    assert here("logs", run.path, "--level", "loud").returncode == 2


def test_logs_follow_while_the_run_is_worked_on(run: RunDirectory) -> None:
    found: list[tuple[str, str]] = []
    lock = run.lock()

    def follow() -> None:
        wanted = Wanted(function="generate", step=1)
        for replica, line in read_logs(run, wanted, follow=True):
            found.append((replica, line.message))

    follower = threading.Thread(target=follow)
    follower.start()
    until(lambda: len(found) == 2)
    with (run.path / "logs" / "generate-10.log").open("a") as file:
        file.write(logged(6, "goes on", step=1) + logged(7, "of another", step=2))
    (run.path / "logs" / "generate-11.log").write_text(logged(8, "new", step=1))
    lock.close()
    follower.join()
    assert found == [
        ("generate-0", "begins"),
        ("generate-0", "slow"),
        ("generate-10", "goes on"),
        ("generate-11", "new"),
    ]


def test_a_real_jobs_log_says_what_it_did(tmp_path: Path) -> None:
    """What the scorer prints is found by the step in which it did; the orchestrator's lines are JSON off a terminal."""
    tiny = make_job(tmp_path)
    reward = tiny.directory / "reward.py"
    reward.write_text(reward.read_text().replace("    return", "    print('scored', ground_truth)\n    return", 1))
    done = command("run", tiny.file, "--run-dir", tmp_path / "run", "steps=2", "validation.every=0", timeout_s=250)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()[:-1]]
    assert {(line["job"], line["function"]) for line in lines} == {("tiny", "orchestrator")}
    assert [line["step"] for line in lines if line["event"] == "step"] == [0, 1, 2]
    assert lines[0]["message"] == "execution 1 begins"
    scored = read(RunDirectory.open(tmp_path / "run"), function="reward", step=2)
    assert len([message for _, message in scored if message.startswith("scored ")]) == 12, "3 prompts x 4 samples"


def test_logs_of_a_run_on_a_cluster_are_the_clusters(tmp_path: Path, root: Path) -> None:
    table = JOB | {"platform": {"kind": "knative", "knative": {"image": "i"}}, "exchange": {"url": "redis://r:6379"}}
    directory = RunDirectory.create(tmp_path / "run", parse_job(table, base=root))
    with pytest.raises(RunError, match="kubectl logs -l rlhf-orchestrate/job=small,rlhf-orchestrate/function=train -c"):
        read(directory, function="train", follow=True)
