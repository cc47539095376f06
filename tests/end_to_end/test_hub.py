"""Ids of the Hub in a job, against a server that speaks its endpoints: online, pinned, offline, refused."""

from __future__ import annotations

import io
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow  # type: ignore[import-untyped]
import pytest
from pyarrow import parquet

from tests.support.hub import Hub, Repository, serve_hub
from tests.support.tiny_job import ENV, Job, arguments, here, model

pytestmark = [pytest.mark.usefixtures("leaks_nothing"), pytest.mark.timeout(300)]

JOB = """
name = "hub"
steps = 1
[model]
path = "acme/tiny"
[data]
train = "acme/sums/main"
validation = "acme/sums/main"
prompts_per_step = 2
[rollout]
n = 2
max_response_length = 4
[reward]
score = "rule:number"
"""


END = "-- end --\n"
DOCTORS = f"""
import os, sys
from orchestrator.commands.main import main
for number, token in enumerate(sys.argv[1:]):
    os.environ["HF_TOKEN"] = token
    main(["doctor", f"job-{{number}}.toml"])
    print({END!r}, end="", flush=True)
"""


@dataclass
class Desk:
    hub: Hub
    directory: Path
    """With job.toml; the cache is in it."""

    def command(self, *words: object, **env: str) -> subprocess.CompletedProcess[str]:
        return self.python(*arguments(*words), **env)

    def python(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        own = {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.directory / "hf"), "HF_HUB_OFFLINE": "0"}
        clean = {name: value for name, value in ENV.items() if name not in ("HF_TOKEN", "HF_HUB_CACHE")}
        return subprocess.run(
            words, env=clean | own | env, cwd=self.directory, capture_output=True, text=True, timeout=250, check=False
        )

    def doctor(self, *, model: str = "acme/tiny", train: str = "acme/sums/main", **env: str) -> str:
        """What it says of a job of these."""
        (found,) = self.doctors({"model": model, "train": train}, **env)
        return found

    def doctors(self, *jobs: Mapping[str, str], **env: str) -> list[str]:
        """One after the other, in one process; each with its own `token`."""
        for number, names in enumerate(jobs):
            text = JOB.replace("acme/tiny", names.get("model", "acme/tiny"))
            train = names.get("train", "acme/sums/main")
            text = text.replace('train = "acme/sums/main"', f'train = "{train}"')
            (self.directory / f"job-{number}.toml").write_text(text)
        done = self.python(sys.executable, "-c", DOCTORS, *(names.get("token", "") for names in jobs), **env)
        *found, rest = done.stdout.split(END)
        assert rest == "", done
        return found


def table(start: int, count: int) -> bytes:
    rows = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(start, start + count)]
    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


@pytest.fixture
def desk(job: Job, tmp_path: Path) -> Iterator[Desk]:
    with serve_hub() as hub:
        files = {path.name: path.read_bytes() for path in (job.directory / "model").iterdir()}
        hub.repositories["models/acme/tiny"] = Repository(files | {"original/old.safetensors": b"not these"})
        hub.repositories["datasets/acme/sums"] = Repository({
            "README.md": b"# sums", "main/train-00000-of-00002.parquet": table(0, 3),
            "main/train-00001-of-00002.parquet": table(3, 4), "main/test-00000-of-00001.parquet": table(8, 2),
            "hard/train-00000-of-00001.parquet": table(10, 5),
        })  # fmt: skip
        (tmp_path / "job.toml").write_text(JOB)
        yield Desk(hub, tmp_path)


def test_a_job_of_ids_runs_and_goes_on_with_what_it_began_with(desk: Desk, job: Job) -> None:
    done = desk.command("run", "job.toml")
    assert done.returncode == 0, done.stderr
    run = desk.directory / "runs" / "hub"
    named = tomllib.loads((run / "job.toml").read_text())
    model_commit = desk.hub.repositories["models/acme/tiny"].commit
    data_commit = desk.hub.repositories["datasets/acme/sums"].commit
    assert named["model"]["path"] == f"acme/tiny@{model_commit}"
    assert named["data"]["train"] == f"acme/sums/main:train@{data_commit}"
    assert named["data"]["validation"] == f"acme/sums/main:test@{data_commit}"
    assert not any(
        "original/" in request or "hard/" in request for request in desk.hub.requests if "tree" not in request
    )
    assert set(model(run)) >= {"model.safetensors", "config.json", "tokenizer.json"}
    # The repositories move on: the run does not, even where nobody can be asked.
    desk.hub.repositories["datasets/acme/sums"] = Repository({"main/train-00000-of-00001.parquet": table(20, 3)})
    desk.hub.requests.clear()
    again = desk.command("resume", "runs/hub", HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr
    assert desk.hub.requests == []


def test_what_ids_mean_and_what_is_refused(desk: Desk) -> None:
    said = {
        "acme/sums/main": "7 prompts to train on, 2 held out",
        "acme/sums/hard": "5 prompts to train on",
        "acme/sums/main:test": "2 prompts to train on",
        "acme/sums": "wants one of acme/sums/hard, acme/sums/main",
        "acme/sums/other": "wants one of acme/sums/hard, acme/sums/main",
        "acme/sums/main:dev": "acme/sums/main:dev: wants a split: acme/sums/main:test, acme/sums/main:train",
    }
    of_models = {
        "acme/nothing": f"acme/nothing is neither a path beside the job file nor a model at {desk.hub.url}",
        "acme/tiny@v9": "acme/tiny has no revision 'v9'",
        "acme/gated": f"acme/gated is gated: accept its terms at {desk.hub.url}/acme/gated, and set HF_TOKEN",
    }
    desk.hub.repositories["models/acme/gated"] = Repository({}, gated=True)
    jobs = [*({"train": name} for name in said), *({"model": name} for name in of_models)]
    for found, wanted in zip(desk.doctors(*jobs), [*said.values(), *of_models.values()], strict=True):
        assert wanted in found


def test_a_revision_a_token_and_a_directory_of_the_same_name(desk: Desk) -> None:
    before = Repository({"train.parquet": table(0, 1)})
    desk.hub.past["datasets/acme/sums"] = {"v1": before, before.commit: before}
    desk.hub.repositories["datasets/acme/own"] = Repository({"train.parquet": table(0, 3)}, token="hf_secret")
    (desk.directory / "acme" / "here").mkdir(parents=True)
    said = desk.doctors(
        {"train": "acme/sums@v1"}, {"train": "acme/own"}, {"train": "acme/own", "token": "hf_secret"},
        {"model": "acme/here"},
    )  # fmt: skip
    wanted = (
        "1 prompts to train on", "a private one wants HF_TOKEN", "3 prompts to train on",
        f"model.path: model {desk.directory}/acme/here: no config.json",
    )  # fmt: skip
    for found, line in zip(said, wanted, strict=True):
        assert line in found


def test_offline_the_line_says_how_to_get_it(desk: Desk) -> None:
    found = desk.doctor(HF_HUB_OFFLINE="1")
    assert "FAIL  model: model.path: acme/tiny is neither a path beside the job file nor in the cache" in found
    assert "HF_HUB_OFFLINE is set: `hf download acme/tiny` where it can be reached" in found
    assert "`hf download acme/sums --repo-type dataset`" in found
    assert desk.hub.requests == []


def test_half_a_split_in_the_cache_is_not_trained_on(desk: Desk) -> None:
    assert "7 prompts" in desk.doctor()
    (half,) = (desk.directory / "hf").rglob("train-00001-of-00002.parquet")
    half.unlink()
    assert "FAIL" in desk.doctor(HF_HUB_OFFLINE="1")


def test_a_model_is_pushed_where_it_can_be_named(desk: Desk, undisturbed: Path) -> None:
    """What a push has sent is a model that another job begins with."""
    done = desk.command("export", undisturbed, "out", "--push", "acme/trained", HF_TOKEN="hf_secret")
    assert done.returncode == 0, done.stderr
    sent = desk.hub.repositories["models/acme/trained"].files
    assert {name: sent[name] for name in sent if name != ".gitattributes"} == {
        path.name: path.read_bytes() for path in (desk.directory / "out").iterdir()
    }
    assert "ok    model: " in desk.doctor(model="acme/trained")
    refused = here("export", undisturbed, desk.directory / "out2", "--push", "trained")
    assert "--push: got 'trained', wants ORG/NAME" in refused.stderr
    assert not (desk.directory / "out2").exists()
