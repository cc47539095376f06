"""Options of losses, advantages and corrections that cannot be: found without torch, before anything runs."""

from __future__ import annotations

import inspect
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from functions.algorithms.advantages import ADVANTAGES
from functions.algorithms.names import ADVANTAGES as ADVANTAGE_NAMES
from functions.algorithms.names import POLICY_LOSSES as LOSS_NAMES
from functions.algorithms.options import ADVANTAGE_OPTIONS, COVARIANCE, LOSS_OPTIONS, RANGES
from functions.algorithms.policy_losses import POLICY_LOSSES
from orchestrator.base.errors import ConfigError
from orchestrator.job.config import parse_job
from orchestrator.session.session import prepare
from tests.support.tiny_job import make_job


@pytest.mark.parametrize(
    ("functions", "names", "options"),
    [(ADVANTAGES, ADVANTAGE_NAMES, ADVANTAGE_OPTIONS), (POLICY_LOSSES, LOSS_NAMES, LOSS_OPTIONS)],
)
def test_the_table_is_that_of_the_signatures(functions: Mapping[str, Any], names: Any, options: Any) -> None:
    assert sorted(functions) == sorted(names)
    for name, function in functions.items():
        given = inspect.signature(function).parameters.values()
        tensors = ("weights", "correction_weights")
        own = [p.name for p in given if p.default is not inspect.Parameter.empty and p.name not in tensors]
        own += COVARIANCE.get(name, ()) if options is LOSS_OPTIONS else ()
        assert list(options.get(name, ())) == own, name
        for parameter in given:
            if parameter.name in RANGES:
                low, high = RANGES[parameter.name]
                assert low <= parameter.default <= high


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    job = make_job(tmp_path_factory.mktemp("job"))
    (job.directory / "own.py").write_text(
        "import torch_that_is_not_there\n\n\ndef loss(*, logprobs, segment, mask, totals, slope=1.0):\n    ...\n\n\n"
        "def positional(logprobs, mask):\n    ...\n"
    )
    return job.directory


OWN = {"loss": "own.py:loss"}


@pytest.mark.parametrize(
    ("algorithm", "line"),
    [
        ({"loss_options": {"clip": 0.1}}, "algorithm: loss_options: 'vanilla' has no option clip; it takes clip_low"),
        ({"loss_options": {"mask": 1}}, "'vanilla' has no option mask"),
        ({"loss_options": {"clip_low": -0.1}}, "loss_options.clip_low: got -0.1, wants a number of at least 0"),
        ({"loss_options": {"clip_low": "0.1"}}, "loss_options.clip_low: got '0.1', wants a number"),
        ({"loss_options": {"dual_clip": 1.0}}, "loss_options.dual_clip: got 1.0, wants a number above 1"),
        ({"loss": "importance_sampling", "loss_options": {"clip_low": 0.1}}, "it takes none"),
        ({"advantage_options": {"gamma": 1.0}}, "'grpo' has no option gamma; it takes epsilon"),
        ({"advantage": "gae", "advantage_options": {"gamma": 1.5}}, "advantage_options.gamma: got 1.5"),
        ({"advantage": "gae", "advantage_options": {"whiten_advantages": 1}}, "wants true or false"),
        (OWN | {"loss_options": {"steep": 2.0}}, "own.py:loss has no option steep; it takes logprobs"),
        ({"loss": "own.py:positional"}, "logprobs, mask must be keyword-only"),
        ({"correction": {"cap": 0}}, "algorithm.correction: cap: got 0.0, wants a number above 0"),
        ({"correction": {"floor": 3.0}}, "floor: got 3.0, wants a number above 0 and at most cap"),
        ({"correction": {"reject": {"token_k4": 1.0}}}, "statistic 'token_k4' is unknown, must be one of token_k1"),
        ({"correction": {"reject": {"token_k2": 0}}}, "token_k2 wants one number above 0, got 0"),
        ({"correction": {"reject": {"token_k2": [0.1, 1]}}}, "token_k2 wants one number above 0"),
        ({"correction": {"reject": {"token_k1": [2.0, 1.0]}}}, "token_k1 wants ratios 0 < low <= high"),
        ({"correction": {"reject": {"token_k1": [0.5, 1.0, 2.0]}}}, "token_k1 wants ratios 0 < low <= high"),
        ({"correction": {"reject": {"token_k1": 0}}}, "token_k1 wants ratios 0 < low <= high"),
        ({"correction": {"reject": {"token_k1": "low"}}}, "token_k1 wants numbers, got 'low'"),
        ({"kl": {"where": "reward", "target": 0}}, "algorithm.kl: target: got 0.0, wants a number above 0"),
        ({"score": {"overlong_buffer": 9}}, "got 9, wants at most max_response_length, which is 8"),
        ({"score": {"low": 1.0, "high": 0.0}}, "low 1 is above high 0"),
        ({"max_rollout_logprob_diff": "of"}, "max_rollout_logprob_diff: got 'of', wants float or 'off'"),
        ({"max_rollout_logprob_diff": 0}, "max_rollout_logprob_diff: got 0.0, wants a number above 0"),
        ({"top_p": 0.5}, "algorithm.top_p: is set by [train], [rollout] or [model], not here"),
    ],
)  # fmt: skip
def test_one_line_before_anything_runs(algorithm: dict[str, Any], line: str, base: Path) -> None:
    table = tomllib.loads((base / "job.toml").read_text()) | {"algorithm": algorithm}
    with pytest.raises(ConfigError) as told:
        prepare(parse_job(table, base=base, where="job.toml"))
    assert line in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"loss_options": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3}},
        OWN | {"loss_options": {"slope": 2.0}},
        {"correction": {"cap": 5, "floor": 0.2, "reject": {"token_k1": [0.5, 2], "seq_mean_k1": 1.01, "token_k3": 1}}},
        {"max_rollout_logprob_diff": "off"},
        {"max_rollout_logprob_diff": 1},
    ],
)
def test_what_can_be_is_taken(algorithm: dict[str, Any], base: Path) -> None:
    table = tomllib.loads((base / "job.toml").read_text()) | {"algorithm": algorithm}
    prepare(parse_job(table, base=base))


def test_another_loss_does_not_get_the_recipes_options(base: Path) -> None:
    """DAPO's clip range means nothing to a loss that does not clip, and the job has no way to take it out."""
    table = tomllib.loads((base / "job.toml").read_text()) | {"recipe": "dapo"}
    assert prepare(parse_job(table, base=base)).settings["actor"].loss_options == {"clip_low": 0.2, "clip_high": 0.28}
    table["algorithm"] = {"loss": "importance_sampling"}
    assert prepare(parse_job(table, base=base)).settings["actor"].loss_options == {}
    table["algorithm"] = {"loss": "vanilla", "loss_options": {"dual_clip": 4.0}}
    params = prepare(parse_job(table, base=base)).settings["actor"]
    assert params.loss_options == {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 4.0}


@pytest.mark.parametrize(
    ("more", "bound"),
    [
        ({}, 0.01),
        ({"model": {"dtype": "bfloat16"}}, 0.1),
        ({"algorithm": {"max_rollout_logprob_diff": "off"}}, None),
        ({"algorithm": {"max_rollout_logprob_diff": 0.5}}, 0.5),
        ({"rollout": {"temperature": 0.7, "top_p": 0.9, "top_k": 5}}, 0.01),
        ({"rollout": {"temperature": 0.0, "top_p": 0.9}}, 0.01),
    ],
)
def test_the_bound_on_by_default(more: dict[str, Any], bound: float | None, base: Path) -> None:
    table = tomllib.loads((base / "job.toml").read_text())
    for section, values in more.items():
        table[section] = table.get(section, {}) | values
    params = prepare(parse_job(table, base=base)).settings["actor"]
    assert params.rollout_bound == bound
    rollout = table["rollout"]
    sampled = rollout.get("temperature", 1.0) > 0
    assert params.top_p == (rollout.get("top_p", 1.0) if sampled else 1.0), "greedy: all of the distribution"
    assert params.top_k == (rollout.get("top_k", 0) if sampled else 0)
    assert math.isfinite(params.temperature)
