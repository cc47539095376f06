"""DELETE while somebody resumes: the job goes on whole, or it is gone whole."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx
import pytest

from tests.api.conftest import JOB, Served


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
