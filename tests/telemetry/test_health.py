"""Health: each number against its bound, and nothing said of what is not measured."""

from __future__ import annotations

import pytest

from orchestrator.telemetry.health import health
from orchestrator.telemetry.validation import validation_names

GOOD = {
    "critic/score/mean": 0.5, "actor/pg_clipfrac": 0.01, "response_length/clip_ratio": 0.02, "actor/entropy": 1.0,
    "critic/groups_zero_variance": 3.0, "critic/groups": 10.0, "actor/kl_loss": 0.01,
    "rollout_corr/abs_diff_mean": 0.001,
}  # fmt: skip


def levels(**last: float) -> dict[str, str]:
    row = GOOD | {name.replace("__", "/"): value for name, value in last.items()}
    return {sign.name: sign.level for sign in health([GOOD] * 5 + [row], 0.01)}


def test_all_is_well() -> None:
    assert set(levels().values()) == {"good"}
    assert set(levels()) == {"Clip ratio", "Cut off", "Same scores", "Entropy", "KL", "Mismatch"}


@pytest.mark.parametrize(
    ("metric", "warn", "bad", "sign"),
    [
        ("actor__pg_clipfrac", 0.25, 0.5, "Clip ratio"), ("response_length__clip_ratio", 0.15, 0.31, "Cut off"),
        ("critic__groups_zero_variance", 6.0, 8.0, "Same scores"), ("actor__entropy", 0.2, 0.05, "Entropy"),
        ("actor__entropy", 3.0, 20.0, "Entropy"), ("actor__kl_loss", -0.2, 0.6, "KL"),
        ("rollout_corr__abs_diff_mean", 0.006, 0.009, "Mismatch"),
    ],
)  # fmt: skip
def test_beyond_its_bound(metric: str, warn: float, bad: float, sign: str) -> None:
    assert levels(**{metric: warn})[sign] == "warn"
    assert levels(**{metric: bad})[sign] == "bad"


def test_updates_that_were_skipped() -> None:
    assert levels(actor__skipped_updates=1.0)["Skipped updates"] == "bad"


def test_what_is_not_measured_is_left_out() -> None:
    assert health([], 0.01) == []
    assert health([{"val-core/a/reward/mean@1": 0.5}], 0.01) == [], "no training step yet"
    assert [sign.name for sign in health([{"critic/score/mean": 0.5, "actor/ppo_kl": 0.0}], 0.01)] == []
    [sign] = health([{"critic/score/mean": 0.5, "rollout_corr/abs_diff_mean": 0.06}], None)
    assert (sign.level, "nothing is refused" in sign.reason) == ("warn", True)


def test_a_validation_is_shown_by_its_accuracy_where_there_is_one() -> None:
    names = ["val-core/a/reward/mean@1", "val-core/b/x/acc/mean@4", "val-core/b/x/reward/mean@4", "critic/score/mean"]
    assert validation_names(names) == ["val-core/a/reward/mean@1", "val-core/b/x/acc/mean@4"]
