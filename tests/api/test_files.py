"""Files by PUT, and `submit --upload`: a job of a user who reaches the API and nothing else."""

from __future__ import annotations

import os
import re
import secrets
import time
from pathlib import Path

import httpx
import pytest

from orchestrator.commands.main import main
from orchestrator.run.stored import FILES
from tests.api.conftest import WRITE, Served
from tests.support.tiny_job import make_job

BUNDLE = "0123456789abcdef"


def put(served: Served, path: str, data: bytes, bundle: str = BUNDLE) -> httpx.Response:
    with served.client() as api:
        return api.put(f"/v1/files/{bundle}", params={"path": path}, content=data)


def test_a_file_arrives_whole_and_again(served: Served) -> None:
    data = b"x" * 3_000_000
    for _ in range(2):
        answer = put(served, "model/a.bin", data)
        assert answer.status_code == 201, answer.text
        assert Path(answer.json()["directory"], "model/a.bin").read_bytes() == data
    other = put(served, "model/a.bin", b"y")
    assert other.status_code == 409, "a job that was accepted with it keeps it"
    assert "another content" in other.json()["detail"]
    assert Path(answer.json()["directory"], "model/a.bin").read_bytes() == data
    assert [p.name for p in Path(answer.json()["directory"]).iterdir()] == ["model"]


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", ".hidden", "a//b", "", "a/" * 9 + "b"])
def test_places_outside_of_a_bundle_are_refused(served: Served, path: str) -> None:
    assert put(served, path, b"").status_code == 422


def test_a_file_is_no_directory(served: Served) -> None:
    assert put(served, "a", b"").status_code == 201
    assert put(served, "a/b", b"").status_code == 409


def test_submit_sends_what_the_job_names(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server has none of the job's files; the job it makes names copies that are the same to the byte."""
    job = make_job(tmp_path / "laptop")
    monkeypatch.setenv("RLHF_TOKEN", WRITE)
    assert main(["submit", str(job.file), "--url", served.url, "--upload"]) == 0
    id = capsys.readouterr().out.split()[1].rstrip(":")
    with served.client() as api:
        config = api.get(f"/v1/jobs/{id}").json()["config"]
    for sent, own in ((config["model"]["path"], "model"), (config["data"]["train"], "")):
        assert f"/{FILES}/" in sent
        assert Path(sent).exists(), own
    model = Path(config["model"]["path"])
    assert {p.name for p in model.iterdir()} >= {"config.json", "tokenizer.json"}
    assert not str(model).startswith(str(tmp_path / "laptop"))


def test_submit_names_what_lies_beside_the_job_file(
    served: Served, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `run` does, in a folder of the data root; what is not there is left as the server's own."""
    job = make_job(root / "below")
    monkeypatch.setenv("RLHF_TOKEN", WRITE)
    overrides = ["data.validation=train.jsonl", "steps=1"]
    (root / "below" / "validation.jsonl").unlink()
    assert main(["submit", str(job.file), *overrides, "--url", served.url]) == 0
    id = capsys.readouterr().out.split()[1].rstrip(":")
    with served.client() as api:
        config = api.get(f"/v1/jobs/{id}").json()["config"]
    below = root.resolve() / "below"
    assert config["model"]["path"] == str(below / "model")
    assert (config["data"]["train"], config["data"]["validation"]) == (str(below / "train.jsonl"),) * 2
    assert config["reward"]["score"] == f"{below}/reward.py:score"


def test_a_file_that_is_not_there_is_told_before_anything_is_sent(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(tmp_path / "laptop")
    assert main(["submit", str(job.file), 'data.train="gone.jsonl"', "--url", served.url, "--upload"]) == 2
    assert re.search(r"data\.train: .*gone\.jsonl: no such file", capsys.readouterr().err)


def test_bundles_that_no_job_names_go_after_a_day(served: Served) -> None:
    """Bundles of names that no other test of this server can have made: a sweep begins with a new bundle."""
    old, young = (Path(put(served, "a", b"", bundle=secrets.token_hex(8)).json()["directory"]) for _ in range(2))
    os.utime(old / "a", (time.time() - 90000,) * 2)
    put(served, "a", b"", bundle=secrets.token_hex(8))
    assert not old.exists()
    assert young.exists()
