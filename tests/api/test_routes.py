"""Every route and every problem of a real server that starts no jobs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.conftest import JOB, READ, Served, parse_stream, serving, write_run


def problem(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert body["status"] == status
    return body


def test_a_job_is_taken_listed_cancelled_resumed_and_deleted(api: httpx.Client, runs: Path, root: Path) -> None:
    made = api.post("/v1/jobs", json=JOB)
    assert made.status_code == 201
    job = made.json()
    assert made.headers["location"] == f"/v1/jobs/{job['id']}"
    assert (job["name"], job["state"], job["step"], job["steps"]) == ("small", "queued", None, 3)
    assert job["config"]["data"]["train"] == str(root / "train.jsonl")
    assert f'name = "{job["id"]}"' in (runs / job["id"] / "job.toml").read_text(), "unique in a shared exchange"
    assert api.get("/v1/jobs", params={"state": "queued"}).json()["jobs"][0]["id"] == job["id"]
    assert api.get(f"/v1/jobs/{job['id']}").json() == job
    assert "waits to be started" in problem(api.delete(f"/v1/jobs/{job['id']}"), 409)["detail"]
    problem(api.post(f"/v1/jobs/{job['id']}/resume"), 409)
    cancelled = api.post(f"/v1/jobs/{job['id']}/cancel")
    assert (cancelled.status_code, cancelled.json()["state"]) == (202, "cancelled")
    assert cancelled.json()["message"] == "cancelled; what is committed stays"
    problem(api.post(f"/v1/jobs/{job['id']}/cancel"), 409)
    assert api.post(f"/v1/jobs/{job['id']}/resume").json()["state"] == "queued"
    assert api.post(f"/v1/jobs/{job['id']}/cancel").json()["state"] == "cancelled"
    events = parse_stream(api.get(f"/v1/jobs/{job['id']}/events").text)
    assert [event["type"] for event in events] == ["cancelled", "cancelled"]
    assert api.delete(f"/v1/jobs/{job['id']}").status_code == 204
    assert not (runs / job["id"]).exists()
    problem(api.get(f"/v1/jobs/{job['id']}"), 404)


def test_an_id_leaves_room_for_the_names_that_are_made_of_it(api: httpx.Client) -> None:
    id = api.post("/v1/jobs", json=JOB | {"name": "a" * 24 + "-" + "b" * 23}).json()["id"]
    assert re.fullmatch(r"a{17}-[0-9a-f]{10}", id)
    assert len(f"{id}-train-cost-critic-00001") <= 63, "a revision's name, which is a label too"


def test_toml_is_taken_as_well(api: httpx.Client) -> None:
    text = 'name = "small"\nsteps = 3\nmodel.path = "model"\ndata.train = "train.jsonl"\nvalidation.every = 0\n'
    text += "rollout.max_response_length = 8\n"
    made = api.post("/v1/jobs", content=text, headers={"Content-Type": "application/toml"})
    assert (made.status_code, made.json()["config"]["steps"]) == (201, 3)
    problem(api.post("/v1/jobs", content="name =", headers={"Content-Type": "application/toml"}), 422)


def test_one_job_per_idempotency_key(api: httpx.Client) -> None:
    headers = {"Idempotency-Key": "once"}
    first, second = (api.post("/v1/jobs", json=JOB, headers=headers) for _ in range(2))
    assert (first.status_code, second.status_code) == (201, 200)
    assert first.json() == second.json()
    other = problem(api.post("/v1/jobs", json=JOB | {"steps": 4}, headers=headers), 422)
    assert "another body" in other["detail"]
    assert api.post("/v1/jobs", json=JOB).json()["id"] != first.json()["id"]


def test_a_claim_whose_job_was_never_written_is_taken_up(tmp_path: Path, root: Path) -> None:
    """The server was killed between the two: the repeated request makes the job under the claimed id."""
    with serving(tmp_path / "runs", root) as server, server.client() as api:
        headers = {"Idempotency-Key": "k"}
        first = api.post("/v1/jobs", json=JOB, headers=headers).json()["id"]
        os.rename(tmp_path / "runs" / first, tmp_path / "lost")
        again = api.post("/v1/jobs", json=JOB, headers=headers)
        assert (again.status_code, again.json()["id"], again.json()["state"]) == (201, first, "queued")


def test_tokens(served: Served, api: httpx.Client) -> None:
    assert httpx.get(f"{served.url}/healthz").json() == {"status": "ok"}
    for headers in ({}, {"Authorization": "Bearer wrong-token-0123456"}, {"Authorization": "Basic eDp5"}):
        refused = httpx.get(f"{served.url}/v1/jobs", headers=headers)
        problem(refused, 401)
        assert refused.headers["www-authenticate"].startswith("Bearer")
        problem(httpx.get(f"{served.url}/metrics", headers=headers), 401)
        problem(httpx.post(f"{served.url}/v1/jobs", json=JOB, headers=headers), 401)
    with served.client(READ) as reader:
        assert reader.get("/v1/jobs").status_code == 200
        for response in (
            reader.post("/v1/jobs", json=JOB),
            reader.post("/v1/jobs/done/cancel"),
            reader.post("/v1/jobs/done/resume"),
            reader.delete("/v1/jobs/done"),
        ):
            assert "may only read" in problem(response, 403)["detail"]
        assert READ not in problem(reader.delete("/v1/jobs/done"), 403)["detail"]


def test_tokens_are_read_again_when_the_file_changes(tmp_path: Path, root: Path) -> None:
    with serving(tmp_path / "runs", root) as server:
        header = {"Authorization": "Bearer another-token-0123456789"}
        assert httpx.get(f"{server.url}/v1/jobs", headers=header).status_code == 401
        (tmp_path / "tokens.new").write_text("new read another-token-0123456789\n")
        os.rename(tmp_path / "tokens.new", tmp_path / "tokens")
        assert httpx.get(f"{server.url}/v1/jobs", headers=header).status_code == 200


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"data": {"train": "/etc/passwd"}}, "data.train: '/etc/passwd' lies outside of"),
        ({"data": {"train": "../x.jsonl"}}, "data.train: "),
        ({"data": {"train": "away/passwd"}}, "data.train: '/etc/passwd' lies outside of"),
        ({"model": {"path": "model/../../x"}}, "model.path: "),
        ({"critic": {"path": "/"}}, "critic.path: '/' lies outside of"),
        ({"reference": {"path": "/usr"}}, "reference.path: "),
        ({"reward": {"score": "model", "model": "/opt"}}, "reward.model: "),
        ({"reward": {"score": "/tmp/evil.py:score"}}, "reward.score: '/tmp/evil.py' lies outside of"),
        ({"recipe": "../evil.py:recipe"}, "recipe: "),
        ({"exchange": {"url": "dir:///etc"}}, "exchange.url: 'dir:///etc' is no store"),
        ({"exchange": {"url": "/etc"}}, "exchange.url: '/etc' is no store"),
        ({"exchange": {"url": "unix:///run/redis"}}, "exchange.url: "),
        ({"platform": {"kind": "knative", "knative": {"image": "x"}}}, "platform.knative: is set by the server's"),
        ({"data": {"train": "a\u0000b"}}, "data.train: 'a\\x00b' has characters that cannot be printed"),
        ({"steps": -1}, "job: steps: should be greater than or equal to 0, got -1"),
        ({"steps": 0}, "job: steps: 0 steps only validate"),
        ({"step": 3}, "job: step: unknown key; did you mean 'steps'?"),
        ({"recipe": "grpp"}, "recipe: unknown 'grpp'; did you mean 'grpo'?"),
        ({"algorithm": {"clip_hi": 1}}, "algorithm"),
        ({"seed": 2**70}, "seed: should fit in 64 bits"),
        ({"algorithm": {"kl": None}}, "algorithm.kl: null is nothing"),
    ],
)
def test_a_job_that_cannot_be_is_refused_in_one_line(api: httpx.Client, change: dict[str, Any], line: str) -> None:
    refused = problem(api.post("/v1/jobs", json=JOB | change), 422)
    assert any(error.startswith(line) for error in refused["errors"]), refused


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'{"steps": NaN}', b"[" * 100_000, b'{"a":' * 40 + b"1"])
def test_a_body_that_is_no_job(api: httpx.Client, body: bytes) -> None:
    problem(api.post("/v1/jobs", content=body, headers={"Content-Type": "application/json"}), 422)


def test_other_refusals(api: httpx.Client) -> None:
    problem(api.post("/v1/jobs", content=b"{}", headers={"Content-Type": "text/plain"}), 415)
    problem(api.post("/v1/jobs", content=b"{}"), 415)
    too_long = b"#" * ((1 << 20) + 1)
    problem(api.post("/v1/jobs", content=too_long, headers={"Content-Type": "application/toml"}), 413)
    problem(api.post("/v1/jobs", content=iter([too_long]), headers={"Content-Type": "application/toml"}), 413)
    problem(api.get("/v1/jobs/no-such-job"), 404)
    problem(api.get("/v1/nothing"), 404)
    problem(api.get("/v1/jobs/..%2f..%2fetc"), 404)
    problem(api.get("/v1/jobs/UPPER"), 422)
    problem(api.get("/v1/jobs", params={"limit": 0}), 422)
    wrong = api.put("/v1/jobs/done")
    problem(wrong, 405)
    assert wrong.headers["allow"] == "DELETE, GET"


def test_a_finished_run(api: httpx.Client) -> None:
    job = api.get("/v1/jobs/done").json()
    assert (job["state"], job["step"], job["cost_usd"], job["message"]) == ("succeeded", 3, 3.0, None)
    problem(api.post("/v1/jobs/done/resume"), 409)
    whole = api.get("/v1/jobs/done/metrics").json()
    assert whole == {
        "steps": [0, 1, 2, 3],
        "metrics": {"actor/kl": [0.0, 0.1, 0.2, 0.3], "critic/score/mean": [None, 0.5, 0.5, 0.5]},
        "low": {},
        "high": {},
        "names": ["actor/kl", "critic/score/mean"],
    }
    part = api.get("/v1/jobs/done/metrics", params={"name": ["actor/", "none"], "from_step": 2, "to_step": 2}).json()
    assert (part["steps"], part["metrics"]) == ([2], {"actor/kl": [0.2]})
    cost = api.get("/v1/jobs/done/cost").json()
    assert (cost["usd"], cost["wall_s"], [step["usd"] for step in cost["steps"]]) == (4.0, 4.0, [1.0] * 4)
    kept = api.get("/v1/jobs/done/checkpoints").json()
    assert [entry["step"] for entry in kept["checkpoints"]] == [0, 3], "where it started, and the newest (keep = 1)"
    assert kept["model"] is True
    problem(api.get("/v1/jobs/done/profiles/1/train-1.json.gz"), 404)
    last = api.get("/v1/jobs/done/samples").json()
    assert (last["step"], [s["response"] for s in last["samples"]]) == (3, ["3", "4"])
    best = api.get("/v1/jobs/done/samples", params={"step": 1, "sort": "-score", "limit": 1}).json()
    assert (best["total"], [s["response"] for s in best["samples"]]) == (2, ["2"])
    assert api.get("/v1/jobs/done/samples", params={"contains": "4"}).json()["total"] == 1
    problem(api.get("/v1/jobs/done/samples", params={"step": 0}), 404)


def test_secrets_do_not_leave(api: httpx.Client) -> None:
    for path in ("/v1/jobs", "/v1/jobs/done", "/v1/jobs/done/events", "/metrics"):
        text = api.get(path).text
        assert "hunter2" not in text
        assert "s3cr3t" not in text
    score = api.get("/v1/jobs/done").json()["config"]["reward"]["score"]
    assert score == "https://***@scorer/?api_key=***"


def test_events_are_taken_up_where_they_broke_off(api: httpx.Client) -> None:
    whole = parse_stream(api.get("/v1/jobs/done/events").text)
    assert [event["type"] for event in whole] == ["started", "step", "step", "step", "step", "finished"]
    assert [event["id"] for event in whole] == [1, 2, 3, 4, 5, 6]
    answer = api.get("/v1/jobs/done/events", headers={"Last-Event-ID": "4"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert parse_stream(answer.text) == whole[4:]
    assert parse_stream(api.get("/v1/jobs/done/events", params={"after": 5}).text) == whole[5:]
    assert api.get("/v1/jobs/done/events", headers={"Last-Event-ID": "6"}).status_code == 204


def test_pages(tmp_path: Path, root: Path) -> None:
    for i in range(5):
        write_run(tmp_path / "runs" / f"run-{i}", root, finished=i % 2 == 0)
    with serving(tmp_path / "runs", root) as server, server.client() as api:
        seen, after = [], None
        while True:
            page = api.get("/v1/jobs", params={"limit": 2} | ({"after": after} if after else {})).json()
            seen += [job["id"] for job in page["jobs"]]
            after = page["next"]
            if after is None:
                break
        assert sorted(seen) == [f"run-{i}" for i in range(5)]
        stopped = api.get("/v1/jobs", params={"state": "interrupted"}).json()["jobs"]
        assert sorted(job["id"] for job in stopped) == ["run-1", "run-3"]


def test_prometheus(api: httpx.Client) -> None:
    answer = api.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = answer.text.splitlines()
    assert 'rlhf_jobs{state="succeeded"} 1.0' in lines
    name = 'rlhf_api_requests_total{method="GET",route="/metrics",status="200"} '
    api.get("/metrics")
    before, after = (
        float(next(line for line in text.splitlines() if line.startswith(name)).removeprefix(name))
        for text in (api.get("/metrics").text, api.get("/metrics").text)
    )
    assert after == before + 1


def test_the_document_names_what_the_server_does(api: httpx.Client) -> None:
    document = api.get("/openapi.json").json()
    submit = document["paths"]["/v1/jobs"]["post"]
    assert set(submit["responses"]) == {"200", "201", "401", "403", "413", "415", "422"}
    assert set(submit["requestBody"]["content"]) == {"application/json", "application/toml"}
    assert "JobConfig" in document["components"]["schemas"]
    text = json.dumps(document)
    for reference in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert reference in document["components"]["schemas"]
