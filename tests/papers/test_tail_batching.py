"""Tail batching: against the loop where nothing is begun beyond what is wanted, by hand, what it does to prompts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from bench.papers.tail_batching import tail_batching
from orchestrator.planner.latency import GenerateCost
from orchestrator.simulation.baselines import SERVERFUL
from orchestrator.simulation.job import simulate
from orchestrator.simulation.scenarios import find_scenario

SMALL = replace(find_scenario("3b-grpo-gsm8k"), prompts_per_step=16, steps=9, gpus=4, epoch_steps=20)


def test_without_more_than_is_wanted_it_is_the_serverful_loop() -> None:
    """Whose generation is simulated call by call."""
    loop, rounds = simulate(SMALL, SERVERFUL), tail_batching(SMALL, eta=1.0)
    np.testing.assert_allclose(rounds.step_s, loop.step_s, rtol=0.03)  # prompts are not dealt quite alike
    lengths = [plan.report.lengths for plan in loop.plans]
    for round_, found in zip(rounds.rounds, lengths, strict=True):
        assert not round_.long
        assert sorted(map(sorted, round_.lengths)) == sorted(map(sorted, found.values()))


def test_every_prompt_is_trained_on_once_and_the_long_ones_together() -> None:
    rounds = tail_batching(SMALL).rounds
    assert [r.long for r in rounds] == [False] * 4 + [True] + [False] * 4  # 4 of 20 wait each time
    assert all(len(r.prompts) == 16 and all(len(lengths) == 4 for lengths in r.lengths) for r in rounds)
    assert set(Counter(number for r in rounds for number in r.prompts).values()) == {1}
    longest = [max(map(max, r.lengths)) for r in rounds]
    assert longest[4] > max(longest[:4])


class ByPrompt:
    """The fourth prompt is long; the last responses of a prompt are the shortest."""

    def length(self, step: int, group: int, index: int, prompt: npt.NDArray[np.int32]) -> int:
        return (1000 if group == 3 else 100) - 10 * index


def test_a_round_by_hand() -> None:
    """4 prompts x 2 wanted: 5 x 3 begin, and of each the last two of three responses are the first to end."""
    scenario = replace(SMALL, prompts_per_step=4, samples_per_prompt=2, steps=1, lengths=ByPrompt(), gpus=5)
    (first,) = tail_batching(scenario).rounds
    assert first.lengths == [[80, 90]] * 4
    cost, prompt = scenario.models(SERVERFUL)["generate"].cost, 250
    assert isinstance(cost, GenerateCost)
    held = 3 * prompt * 90 + (80**2 + 2 * 90**2) / 2 - prompt * 10  # tokens x steps until the second one ends
    expected = 1.0 + cost.call_s + cost.prefill_token_s * prompt + cost.step_s * 90 + cost.kv_token_s * held
    assert first.generated_s == pytest.approx(expected)
