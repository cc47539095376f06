"""A job by POST on the stand-in cluster: the server's defaults say where functions run, the job says nothing of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.api.conftest import serving, wait_for
from tests.knative.conftest import Start, control_plane  # noqa: F401  # a fixture
from tests.support.tiny_job import ENV, make_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_every_function_is_at_zero_before_and_after(
    control_plane: Start,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plane = control_plane(warm=("generate", "reward", "train"))
    job = make_job(tmp_path / "data")
    defaults = tmp_path / "defaults.json"
    knative = {"image": "functions", "ingress": plane.ingress_url}
    platform = {"kind": "knative", "knative": knative}
    exchange = {"url": f"dir://{tmp_path}/exchange"}
    defaults.write_text(json.dumps({"platform": platform, "exchange": exchange, "limits": {"call_s": 600.0}}))
    monkeypatch.setitem(ENV, "KUBECONFIG", str(plane.root / "kubeconfig"))
    with (
        serving(tmp_path / "runs", tmp_path / "data", "--defaults", str(defaults), max_running=1) as server,
        server.client() as api,
    ):
        body = job.file.read_text().replace("steps = 3", "steps = 2")
        made = api.post("/v1/jobs", content=body, headers={"Content-Type": "application/toml"})
        assert made.status_code == 201, made.text
        id = made.json()["id"]
        wait_for(lambda: plane.ask(lambda cluster: len(cluster.pods)), what="a function's pod")
        ended = ("succeeded", "failed", "cancelled")
        wait_for(lambda: api.get(f"/v1/jobs/{id}").json()["state"] in ended, what="the end", timeout_s=200)
        state = api.get(f"/v1/jobs/{id}").json()
        assert (state["state"], state["step"]) == ("succeeded", 2), state["message"]
        assert plane.ask(lambda cluster: (list(cluster.pods), list(cluster.objects))) == ([], [])
        assert api.get(f"/v1/jobs/{id}/cost").json()["functions"]["generate"]["replica_s"] > 0
        wait_for(lambda: api.delete(f"/v1/jobs/{id}").status_code == 204, what="deleted")
        left = [path for path in (tmp_path / "exchange").rglob("*") if path.is_file() and id in str(path)]
        assert [path for path in left if "+" not in str(path)] == [], "its weights and journal are gone too"
