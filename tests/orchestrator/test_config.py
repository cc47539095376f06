"""Every mistake in a job file is one line: the key, what it got, what would be right."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from orchestrator.base.errors import ConfigError
from orchestrator.job.checks import check_code
from orchestrator.job.config import JobConfig, dump_job, load_job, parse_job

GOOD: dict[str, Any] = {"name": "tiny", "steps": 3, "model": {"path": "model"}, "data": {"train": "train.jsonl"}}


def mistakes(**changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_job(GOOD | changes, base=Path("/jobs"), where="job.toml")
    return str(caught.value).splitlines()


def test_paths_are_relative_to_the_file() -> None:
    job = parse_job(GOOD | {"reward": {"score": "reward.py:score"}}, base=Path("/jobs"))
    assert job.model.path == "/jobs/model"
    assert job.data.train == "/jobs/train.jsonl"
    assert job.reward.score == "/jobs/reward.py:score"


def test_a_url_or_a_rule_is_no_path() -> None:
    for score in ("http://localhost:1/a.py:x", "rule:exact"):
        assert parse_job(GOOD | {"reward": {"score": score}}, base=Path("/jobs")).reward.score == score


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"rolout": {}}, "job.toml: rolout: unknown key; did you mean 'rollout'?"),
        ({"lr": 1e-6}, "job.toml: lr: unknown key; did you mean 'train.lr'?"),
        ({"train": {"learning_rate": 1}}, "job.toml: train.learning_rate: unknown key; did you mean 'train.lr'?"),
        ({"kl_coef": 0.1}, "job.toml: kl_coef: unknown key; did you mean 'algorithm.kl.coef'?"),
        ({"rollout": {"gpus": 1}}, "job.toml: rollout.gpus: unknown key; did you mean 'functions.generate.gpus'?"),
        ({"profile": {"steps": [9]}}, "job.toml: profile.steps: got 9, the job has 3"),
        ({"rollout": {"topp": 1}}, "job.toml: rollout.topp: unknown key; did you mean 'rollout.top_p'?"),
        (
            {"functions": {"generate": {"replicsa": 2}}},
            "job.toml: functions.generate.replicsa: unknown key; did you mean 'functions.generate.replicas'?",
        ),
        ({"rollout": {"n": "8"}}, "job.toml: rollout.n: should be a valid integer, got '8'"),
        ({"rollout": {"n": 0}}, "job.toml: rollout.n: should be greater than or equal to 1, got 0"),
        ({"model": {}}, "job.toml: model.path: is required and was not set"),
        (
            {"exchange": {"url": 3}},
            "job.toml: exchange.url: should be a valid string, got 3",
        ),
    ],
)  # fmt: skip
def test_one_line_per_mistake(changes: dict[str, Any], line: str) -> None:
    assert mistakes(**changes) == [line]


def test_all_mistakes_are_told_at_once() -> None:
    assert len(mistakes(rollout={"n": 0, "nn": 1}, steps="x")) == 3


def test_contradictions_are_told() -> None:
    data = {"train": "a.jsonl", "validation": "b.jsonl", "validation_fraction": 0.1}
    assert mistakes(data=data) == ["job.toml: data.validation and data.validation_fraction exclude each other: set one"]


def test_without_prompts_to_validate_on_nothing_is_validated(tmp_path: Path) -> None:
    """Resolved and read back, too: what was not asked for is not asked for then."""
    held_out: list[dict[str, Any]] = [{}, {"validation": "v.jsonl"}, {"validation_fraction": 0.5}]
    for data, every in zip(held_out, (0, 10, 10), strict=True):
        job = parse_job(GOOD | {"data": GOOD["data"] | data}, base=tmp_path)
        (tmp_path / "job.toml").write_text(dump_job(job))
        assert (job.validate_every, load_job(tmp_path / "job.toml").validate_every) == (every, every)
    assert mistakes(validation={"every": 5}) == [
        "job.toml: validation.every: got 5, but there is nothing to validate on: set data.validation or "
        "data.validation_fraction, or leave it out"
    ]


def test_the_resolved_job_reads_back_as_itself(tmp_path: Path) -> None:
    job = parse_job(GOOD | {"functions": {"generate": {"replicas": 2}}}, base=tmp_path)
    (tmp_path / "job.toml").write_text(dump_job(job))
    assert load_job(tmp_path / "job.toml") == job


def test_overrides(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(dump_job(parse_job(GOOD, base=tmp_path)))
    job: JobConfig = load_job(
        tmp_path / "job.toml", ["rollout.n=16", "name=other", "train.lr=1e-4", "functions.train.threads=2"]
    )
    assert (job.rollout.n, job.name, job.train.lr, job.function("train").threads) == (16, "other", 1e-4, 2)


@pytest.mark.parametrize(
    ("override", "message"),
    [("rollout.n", "want key.path=value"), ("name.x=1", "'name' is a value, not a section")],
)
def test_bad_overrides(tmp_path: Path, override: str, message: str) -> None:
    (tmp_path / "job.toml").write_text(dump_job(parse_job(GOOD, base=tmp_path)))
    with pytest.raises(ConfigError, match=message):
        load_job(tmp_path / "job.toml", [override])


def test_a_file_that_is_none_or_no_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such job file"):
        load_job(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("name = \nx = 1\n")
    with pytest.raises(ConfigError, match=r"bad\.toml: not TOML: .*line 1"):
        load_job(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("planner", "line"),
    [
        (
            {"policy": "adaptive", "keep_warm": True},
            'planner: keep_warm is for policy = "static": what "adaptive" keeps is its own to say',
        ),
        ({"objective": "cost"}, 'planner: objective is for policy = "adaptive": "static" does not decide by it'),
        ({"policy": "rlhfless"}, "planner.policy: should be 'static' or 'adaptive', got 'rlhfless'"),
        ({"policy": "adaptive", "deadline_s": 0.0}, "planner.deadline_s: should be greater than 0, got 0.0"),
        (
            {"policy": "adaptive", "budget_usd": 1.0},
            "planner.budget_usd wants prices: set functions.<name>.usd_per_hour",
        ),
        ({"gpu": "T4"}, "planner.gpu: device 'T4' is not in the table (wants one of A100, H100, H200, L40S)"),
        ({"gpu": "L40S"}, "planner.gpu wants functions.generate.gpus >= 1, got 0"),
    ],
)
def test_a_planner_setting_without_effect_is_refused(planner: dict[str, Any], line: str) -> None:
    assert mistakes(planner=planner) == [f"job.toml: {line}"]


def test_a_planner_is_the_same_after_its_job_was_written_down(tmp_path: Path) -> None:
    given = {"policy": "adaptive", "objective": "cost", "deadline_s": 60.0}
    for planner in (given, {}, {"keep_warm": True}):
        job = parse_job(GOOD | {"planner": planner}, base=Path("/jobs"))
        (tmp_path / "job.toml").write_text(dump_job(job))
        assert load_job(tmp_path / "job.toml") == job


ADAPTIVE = {"policy": "adaptive", "gpu": "L40S"}
BF16 = {"path": "model", "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"functions": {"generate-tail": {"gpus": 4}}},
            'functions.generate-tail: planner.policy = "static" never moves a tail to it (wants "adaptive")',
        ),
        (
            {"functions": {"generate": {"gpus": 2}, "generate-tail": {"gpus": 1}}, "planner": ADAPTIVE, "model": BF16},
            "functions.generate-tail.gpus: got 1, functions.generate has 2 "
            "(wants more: a tail moves to be decoded faster)",
        ),
        (
            {"functions": {"generate-tail": {"gpus": 4}}, "planner": {"policy": "adaptive"}},
            "functions.generate-tail: wants planner.gpu, by which its speed is known before it was used",
        ),
        (
            {
                "functions": {"generate": {"gpus": 1}, "generate-tail": {"gpus": 4}},
                "planner": ADAPTIVE,
                "model": BF16,
                "rollout": {"engine": "torch"},
            },
            'functions.generate-tail.gpus: got 4, rollout.engine = "torch" uses one ("vllm" splits a model)',
        ),
        (
            {"functions": {"generate_tail": {"gpus": 4}}},
            "functions.generate_tail: no such function; did you mean 'generate-tail'?",
        ),
        (
            {"rollout": {"vllm": {"gpus": 2}}},
            "rollout.vllm.gpus: set functions.generate.gpus, the GPUs of one replica",
        ),
    ],
)
def test_functions_that_make_no_sense_are_told_in_one_line(changes: dict[str, Any], line: str) -> None:
    assert mistakes(**changes) == [f"job.toml: {line}"]


def test_several_scorers(tmp_path: Path) -> None:
    """Each by what follows its `:`; those without a weight weigh 1; every one is looked at before anything runs."""
    (tmp_path / "reward.py").write_text("def brief(completions, **columns): ...\n")
    reward: dict[str, Any] = {"score": ["rule:number", "reward.py:brief"], "weights": {"brief": 0.1}}
    job = parse_job(GOOD | {"reward": reward}, base=tmp_path)
    assert job.scoring["scorers"] == {"number": "rule:number", "brief": f"{tmp_path}/reward.py:brief"}
    assert job.scoring["weights"] == {"number": 1.0, "brief": 0.1} == job.reward.weighting
    assert "score" not in job.scoring
    check_code(job)
    again = parse_job(tomllib.loads(dump_job(job)), base=Path("/"))
    assert again == job, "as a run keeps it"
    for wrong, message in (
        ({"score": ["rule:number", "reward.py:number"]}, "two scorers are called 'number'"),
        ({"score": ["rule:number", "environment"]}, "an environment scores alone"),
        ({"score": []}, "wants scorers"),
        (reward | {"weights": {"briefly": 1.0}}, "weights.briefly: there is no such scorer; there are number, brief"),
        ({"score": ["rule:exact", "model"]}, "reward.model is the directory"),
        ({"score": ["rule:exact", "rule:code"]}, "rule:code runs code that a model wrote"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_job(GOOD | {"reward": wrong}, base=tmp_path)
    with pytest.raises(ConfigError, match="there is no rule 'numbr'; did you mean 'rule:number'"):
        check_code(parse_job(GOOD | {"reward": {"score": ["rule:exact", "rule:numbr"]}}, base=tmp_path))
