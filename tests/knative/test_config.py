"""[platform.knative] in a job file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.base.errors import ConfigError
from orchestrator.job.config import JobConfig, dump_job, load_job, parse_job
from orchestrator.platforms.knative.manifests import check_names

JOB: dict[str, Any] = {
    "name": "j",
    "steps": 1,
    "model": {"path": "m"},
    "data": {"train": "t"},
    "exchange": {"url": "redis://redis:6379/0"},
    "platform": {
        "kind": "knative",
        "knative": {
            "image": "i",
            "images": {"train": "t"},
            "volumes": [{"name": "models", "mount_path": "/models", "claim": "models"}],
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "command": ["python", "-m", "functions.server"],
            "env_secrets": ["s3"],
        },
    },
}


def parse(**changes: Any) -> JobConfig:
    return parse_job(JOB | changes, base=Path("/"))


def test_the_resolved_job_reads_back_as_itself(tmp_path: Path) -> None:
    job = parse()
    (tmp_path / "job.toml").write_text(dump_job(job))
    assert load_job(tmp_path / "job.toml") == job


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"platform": {"kind": "knative"}}, "platform: kind = .knative. wants its settings, platform.knative.image"),
        ({"exchange": {}}, "exchange.url is needed on Knative"),
        ({"platform": {"kind": "knative", "knative": {}}}, "platform.knative.image: is required"),
        (
            {"platform": {"kind": "knative", "knative": {"image": "i", "namspace": "x"}}},
            "platform.knative.namspace: unknown key",
        ),
    ],
)
def test_one_line_per_mistake(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(**changes)


def test_names_that_kubernetes_could_not_hold_are_told_early() -> None:
    """The Deployment of a function's Revision has the longest name; above 63 characters it would be a hash."""
    check_names("j" * 36, ["generate", "reference"])
    with pytest.raises(ConfigError, match=r"has 36 characters; .*'train-cost-critic' has room for 28"):
        check_names("j" * 36, ["generate", "train-cost-critic"])
