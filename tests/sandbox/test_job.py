"""What a job may say of its sandbox, and what it hears in one line before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.base.errors import ConfigError, DataError
from orchestrator.job.config import JobConfig, load_job
from orchestrator.run.identity import RunIdentity
from orchestrator.session.session import prepare

JOB = Path(__file__).parents[2] / "examples" / "code" / "job.toml"
KNATIVE = ("platform.kind=knative", "platform.knative.image=i", "exchange.url=redis://r:6379/0")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["reward.sandbox=false"], "rule:code runs code that a model wrote: set reward.sandbox = true, or to a URL"),
        (["reward.sandbox=docker"], "got 'docker', wants true or the URL of a service"),
        (["reward.sandbox_timeout_s=0"], "reward.sandbox_timeout_s"),
        (["reward.sandbox_memory_mb=1"], "reward.sandbox_memory_mb"),
        (["reward.sandboxes=true"], "reward.sandboxes"),
        ([*KNATIVE], "reward.sandbox = true on Knative wants platform.knative.sandbox"),
        ([*KNATIVE, "platform.knative.sandbox=sandbox"], "platform.knative.sandbox"),
    ],
)
def test_bad_values(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        load_job(JOB, overrides=overrides)
    assert "\n" not in str(raised.value).strip()


def test_a_rule_that_is_nearly_one() -> None:
    with pytest.raises(ConfigError, match="there is no rule 'codes'; did you mean 'rule:code'"):
        prepare(load_job(JOB, overrides=["reward.score=rule:codes"]))


def scoring(*overrides: str) -> Any:
    return load_job(JOB, overrides=overrides).scoring["sandbox"]


def test_where_it_is() -> None:
    assert scoring() == "local"
    assert scoring("reward.sandbox=http://s:1") == "http://s:1"
    assert scoring("reward.sandbox=false", "reward.score=rule:exact") == ""
    assert scoring(*KNATIVE, "platform.knative.sandbox=http://s/run_code") == "http://s/run_code"


def test_a_run_goes_on_with_another_sandbox() -> None:
    def identity(job: JobConfig) -> Any:
        return RunIdentity.of("1", "", job).job

    other = ["reward.sandbox=http://s:1", "reward.sandbox_timeout_s=3", "reward.sandbox_memory_mb=64"]
    assert identity(load_job(JOB)) == identity(load_job(JOB, overrides=other))


def test_tests_of_no_known_form_are_found_before_the_job_starts(tmp_path: Path) -> None:
    lines = (JOB.parent / "train.jsonl").read_text().splitlines()[:20]
    row = json.loads(lines[16])
    row["reward_model"]["ground_truth"] = json.dumps({"inputs": ["1"], "outputs": ["1"], "fn_name": 7.5, "tests": 1})
    row["tests"] = {"cases": []}
    lines[16] = json.dumps(row)
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"train\.jsonl:17: rule:code: tests of unknown form in tests: lacks 'inputs'"):
        prepare(load_job(JOB, overrides=[f"data.train={tmp_path / 'train.jsonl'}", "data.prompts_per_step=8"]))
