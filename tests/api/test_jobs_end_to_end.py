"""A real job through a real server: all that can be killed is killed, and the job ends as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from functions.server.forkserver_client import FORKSERVER
from tests.api.conftest import WRITE, free_port, parse_stream, serving, wait_for
from tests.support.tiny_job import ENV, assert_nothing_left, here, make_job

STEPS = 6
pytestmark = pytest.mark.timeout(300)


def types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events if event["type"] != "stage"]


def test_from_post_to_model_over_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """POST, server killed, server back, cancel, resume, orchestrator killed, done; and a deleted job leaves nothing.
    The first server keeps a forkserver of its own, whose agents outlive it."""
    monkeypatch.delitem(ENV, FORKSERVER)
    make_job(tmp_path / "data")
    held = tmp_path / "held"
    """While it is there, no step goes on: its scorer waits."""
    reward = tmp_path / "data" / "reward.py"
    wait = f"    import os, time\n    while os.path.exists({str(held)!r}): time.sleep(0.01)\n    return"
    reward.write_text(reward.read_text().replace("    return", wait, 1))
    runs, port = tmp_path / "runs", free_port()
    file = tmp_path / "data" / "job.toml"
    file.write_text(body := file.read_text().replace("steps = 3", f"steps = {STEPS}"))
    headers = {"Content-Type": "application/toml", "Idempotency-Key": "one"}

    def step_of(api: httpx.Client, id: str) -> int:
        step = api.get(f"/v1/jobs/{id}").json()["step"]
        return -1 if step is None else int(step)

    with serving(runs, tmp_path / "data", max_running=1, port=port) as server, server.client() as api:
        id = api.post("/v1/jobs", content=body, headers=headers).json()["id"]
        with api.stream("GET", f"/v1/jobs/{id}/events") as stream:
            text = ""
            for chunk in stream.iter_text():
                text += chunk
                if "event: step" in text and text.endswith("\n\n"):
                    held.touch()
                    break
        seen = parse_stream(text)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()

    monkeypatch.undo()
    with serving(runs, tmp_path / "data", max_running=1, port=port) as server, server.client() as api:
        assert api.get(f"/v1/jobs/{id}").json()["state"] == "running", "the job goes on without its server"
        assert api.post("/v1/jobs", content=body, headers=headers).json()["id"] == id
        held.unlink()
        wait_for(lambda: step_of(api, id) >= 1, what="step 1")
        held.touch()
        assert api.post(f"/v1/jobs/{id}/cancel").status_code == 202
        wait_for(lambda: api.get(f"/v1/jobs/{id}").json()["state"] == "cancelled", what="cancelled")
        held.unlink()
        stopped_at = step_of(api, id)

        assert api.post(f"/v1/jobs/{id}/resume").status_code == 202
        wait_for(lambda: step_of(api, id) > stopped_at, what="a step after the resume")
        held.touch()
        os.kill(int((runs / id / "lock").read_text()), signal.SIGKILL)
        wait_for(lambda: api.get(f"/v1/jobs/{id}").json()["executions"] == 3, what="started again by the server")
        held.unlink()

        rest = parse_stream(api.get(f"/v1/jobs/{id}/events", headers={"Last-Event-ID": str(seen[-1]["id"])}).text)
        events = seen + rest
        assert [event["id"] for event in events] == list(range(1, len(events) + 1))
        assert [event["data"]["step"] for event in events if event["type"] == "step"] == list(range(STEPS + 1))
        ends = [kind for kind in types(events) if kind in ("started", "cancelled", "finished", "failed")]
        assert ends == ["started", "cancelled", "started", "started", "finished"]

        job = api.get(f"/v1/jobs/{id}").json()
        assert (job["state"], job["step"], job["executions"]) == ("succeeded", STEPS, 3)
        assert api.get(f"/v1/jobs/{id}/metrics").json()["steps"] == list(range(STEPS + 1))
        assert api.get(f"/v1/jobs/{id}/samples").json()["total"] == 12
        assert api.get(f"/v1/jobs/{id}/checkpoints").json()["model"] is True

        assert all(sample["mismatch"] < 1e-3 for sample in api.get(f"/v1/jobs/{id}/samples").json()["samples"])
        assert api.get(f"/v1/jobs/{id}/plan").json()["plan"]["replicas"] == {"generate": 2, "reward": 1, "train": 1}
        timeline = api.get(f"/v1/jobs/{id}/replicas").json()
        drawn = [step for step, _, _ in timeline["steps"]]
        assert drawn == sorted(drawn)
        undrawn = set(range(STEPS + 1)) - set(drawn)
        assert len(undrawn) <= 1, "but for one that is killed between its commit and the trace"
        train = next(function for function in timeline["functions"] if function["name"] == "train")
        assert len(train["calls"]) >= STEPS - len(undrawn), "a call for each step, over three executions"
        for start, ready, draining, stop in (life[1:5] for life in train["lives"]):
            assert start <= ready <= stop
            assert start <= draining <= stop

        assert "no agent of the forkserver" not in (runs / id / "logs" / "node-agent.log").read_text()
        wait_for(lambda: api.delete(f"/v1/jobs/{id}").status_code == 204, what="deleted")
        assert {path.name for path in runs.iterdir()} == {".idempotency", ".lock", ".tick"}
    assert_nothing_left()


def test_submit_follows_a_job_to_its_failure(tmp_path: Path) -> None:
    """Weights that are no numbers: one line, exit code 1, no restarts; and a refused job is exit code 1 as well."""
    root = make_job(tmp_path / "data").directory
    weights = load_file(root / "model" / "model.safetensors")
    save_file({name: tensor * np.nan for name, tensor in weights.items()}, root / "model" / "model.safetensors")
    job = tmp_path / "job.toml"
    job.write_text((root / "job.toml").read_text())
    token = tmp_path / "token"
    with serving(tmp_path / "runs", root, max_running=1) as server:
        token.write_text(WRITE)
        words = ["submit", job, "--url", server.url, "--token-file", token]
        done = here(*words, "--follow")
        assert done.returncode == 1, done.stderr
        assert "failed: " in done.stdout.splitlines()[-1]
        assert str(root / "model") in done.stdout.splitlines()[-1]
        run = next(path for path in (tmp_path / "runs").iterdir() if not path.name.startswith("."))
        assert json.loads((run / "api.json").read_text())["launches"] == 1
        refused = here(*words, "steps=-1")
        assert refused.returncode == 1
        assert refused.stderr == "error: 127.0.0.1 (422): job: steps: should be greater than or equal to 0, got -1\n"
        token.write_text("wrong-token-0123456789")
        assert "this token is not known" in here(*words).stderr
    away = here(*words)
    assert (away.returncode, "no server answers" in away.stderr) == (1, True)
