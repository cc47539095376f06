"""What a planner learns of episodes, and what follows: by hand, and against brute force."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.planner.base import Prompt, Waits
from orchestrator.planner.episodes import EpisodeModel, ended_within, resume_cost, stays_s, thinned
from orchestrator.planner.latency import GenerateCost

START_S = 4.0


def of(*answers: float) -> dict[str, Waits]:
    return {"": Waits([2.0], sorted(answers), sorted(answers))}


def test_a_replica_stays_for_an_answer_that_comes_soon_and_goes_at_once_where_none_does() -> None:
    assert stays_s({"": [0.0]}, of(1.0, 1.0, 1.0), START_S) >= 1.0
    assert stays_s({"": [0.0]}, of(60.0, 90.0), START_S) == 0.0
    assert stays_s({"": [0.0]}, {}, START_S) == START_S, "nothing was seen: as long as a start takes"
    assert stays_s({"": [200.0]}, of(1.0, 60.0), START_S) == 0.0, "it has waited for longer than anything did"
    assert stays_s({"": [59.0]}, of(1.0, 60.0), START_S) >= 1.0, "the long one is due"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.1, 30), min_size=60, max_size=80), st.lists(st.floats(0, 10), min_size=1, max_size=3))
def test_no_other_time_to_stay_is_expected_to_cost_less(answers: list[float], waited: list[float]) -> None:
    """The expected cost, by drawing each episode's answer among those that took longer than it has waited."""
    seen = np.array(answers)
    waited = [w for w in waited if (seen > w).sum() > 20]  # of few the model trusts that none comes less
    dice = np.random.default_rng(0)
    drawn = [dice.choice(seen[seen > w], 2000) - w for w in waited]
    first = np.min(drawn, axis=0) if drawn else np.full(2000, math.inf)

    def cost(t: float) -> float:
        return float(np.where(first <= t, np.minimum(first, t), t + START_S).mean())

    found = stays_s({"": waited}, of(*answers), START_S)
    assert 0.0 <= found <= START_S
    assert cost(found) <= min(cost(t) for t in np.linspace(0, START_S, 17)) + 0.2 * START_S


def test_episodes_wait_as_they_did_each_in_its_environment() -> None:
    model = EpisodeModel()
    model.observe({"slow": Waits([3], [10.0, 50.0], [60.0, 60.0]), "fast": Waits([2], [1.0], [1.0])})
    prompts = [Prompt(0, 0, (1,), environment="slow"), Prompt(1, 1, (1,), environment="fast"), Prompt(2, 2, (1,))]
    assert model.totals(prompts, 2, seed=1).tolist() == [60.0, 60.0, 1.0, 1.0, 0.0, 0.0]
    assert model.waits()["slow"].answer_s == [10.0, 50.0]


def test_what_is_left_of_the_slowest() -> None:
    known = of(2.0, 4.0, 8.0, 16.0)
    assert ended_within(4.0, [("", 0.0)], known) == 0.5
    assert ended_within(4.0, [("", 0.0), ("", 5.0)], known) == 0.25, "both: 2 of 4, and 1 of the 2 that took longer"
    assert ended_within(30.0, [("", 30.0)], known) == 0.5, "as long again"
    assert ended_within(4.0, [], known) == ended_within(4.0, [("new", 0.0)], known) == 1.0


def test_keys_and_values_move_where_that_is_cheaper_than_computing_again() -> None:
    def cost(moved_token_s: float | None) -> GenerateCost:
        return GenerateCost(0.1, 1e-4, 0.01, 0.0, 0.0, moved_token_s)

    assert resume_cost(cost(None)).keep_from is None
    assert resume_cost(cost(6e-5)).keep_from is None, "written and read: dearer than computing"
    kept = resume_cost(cost(1e-5))
    assert kept.keep_from == 101
    assert kept.token_s == 2e-5


def test_many_are_kept_as_quantiles() -> None:
    assert thinned([3.0, 1.0, 2.0]) == [1.0, 2.0, 3.0]
    many = thinned(list(range(10_001)))
    assert (len(many), many[0], many[64], many[-1]) == (129, 0, 5000, 10_000)
