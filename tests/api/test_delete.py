"""DELETE while somebody resumes: the job goes on whole, or it is gone whole."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from functions.exchange.directory import DirectoryExchange
from orchestrator.base.canonical import canonical
from orchestrator.job.config import parse_job
from orchestrator.run.directory import RunDirectory
from tests.api.conftest import JOB, Served, serving, wait_for


@pytest.fixture
def stalled() -> socket.socket:
    """A store that takes connections and answers nothing until it is closed."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(8)
    listener.settimeout(60)
    return listener


def test_a_resume_never_meets_half_a_deletion(api: httpx.Client, served: Served, stalled: socket.socket) -> None:
    url = f"redis://127.0.0.1:{stalled.getsockname()[1]}/0"
    id = api.post("/v1/jobs", json=JOB | {"exchange": {"url": url}}).json()["id"]
    assert api.post(f"/v1/jobs/{id}/cancel").status_code == 202
    with ThreadPoolExecutor(1) as pool, served.client() as other:
        deleting = pool.submit(other.delete, f"/v1/jobs/{id}")
        with closing(stalled):
            connection, _ = stalled.accept()  # the deletion is in the store now
            assert api.post(f"/v1/jobs/{id}/resume").status_code == 404, "it is away: nothing can start on it"
            assert api.get(f"/v1/jobs/{id}").status_code == 404
            connection.close()
        refused = deleting.result()
    assert refused.status_code == 500
    assert f"job {id} is not deleted" in refused.json()["detail"]
    assert api.get(f"/v1/jobs/{id}").json()["state"] == "cancelled", "the store could not be reached: it is back"
    assert api.post(f"/v1/jobs/{id}/resume").status_code == 202


def test_a_job_that_a_command_works_on_is_not_deleted(api: httpx.Client, served: Served) -> None:
    id = api.post("/v1/jobs", json=JOB).json()["id"]
    assert api.post(f"/v1/jobs/{id}/cancel").status_code == 202
    assert api.post(f"/v1/jobs/{id}/resume").status_code == 202
    assert api.delete(f"/v1/jobs/{id}").status_code == 409, "it waits to be started"
    assert api.post(f"/v1/jobs/{id}/cancel").status_code == 202
    assert api.delete(f"/v1/jobs/{id}").status_code == 204
    assert not (served.runs / id).exists()
    assert not list(served.runs.glob(".deleted-*"))


def left_behind(runs: Path, root: Path, url: str) -> tuple[Path, bytes]:
    """What a server leaves that was killed in a deletion, before the store; and the lease that says whose data is."""
    path = runs / ".deleted-small-00000000"
    job = parse_job(JOB | {"exchange": {"url": url}}, base=root)
    directory = RunDirectory.create(path, job)
    return path, canonical({"holder": "x", "run": directory.identity(job).to_json()})


@pytest.mark.parametrize("had", [["lease/000001", "journal/000000", "step/x"], ["lease/000001"], []])
def test_a_deletion_that_was_killed_is_ended_by_the_next_server(tmp_path: Path, root: Path, had: list[str]) -> None:
    path, lease = left_behind(tmp_path / "runs", root, f"dir://{tmp_path}/exchange")
    exchange, other = (DirectoryExchange(str(tmp_path / "exchange" / name)) for name in ("small", "other"))
    other.put("lease/000001", b"theirs")
    for key in had:
        exchange.put(key, lease)
    with serving(tmp_path / "runs", root):
        wait_for(lambda: not path.exists(), what="the end of the deletion")
    assert exchange.list("") == []
    assert other.list("") == ["lease/000001"]


def test_what_is_another_runs_stays(tmp_path: Path, root: Path) -> None:
    url = f"dir://{tmp_path}/exchange"
    path, _ = left_behind(tmp_path / "runs", root, url)
    _, lease = left_behind(tmp_path / "others", root, url)
    exchange = DirectoryExchange(str(tmp_path / "exchange" / "small"))
    exchange.put("lease/000001", lease)
    exchange.put("journal/000000", b"theirs")
    with serving(tmp_path / "runs", root):
        wait_for(lambda: not path.exists(), what="the end of the deletion")
    assert exchange.list("") == ["journal/000000", "lease/000001"]


def test_a_deletion_waits_for_a_store_that_is_away(tmp_path: Path, root: Path) -> None:
    path, _ = left_behind(tmp_path / "runs", root, "redis://127.0.0.1:1/0")
    with serving(tmp_path / "runs", root) as server:
        wait_for(lambda: "is not all gone" in server.log.read_text(), what="a line about it")
    assert (path / "job.toml").exists(), "the next server tries again"
