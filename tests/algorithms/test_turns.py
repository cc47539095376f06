"""Samples with turns: what was given changes no bit, rewards reach what was said before them, GiGPO is verl-agent's."""

from __future__ import annotations

import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from functions.algorithms.advantages import ADVANTAGES, gigpo
from functions.algorithms.aggregation import batch_totals
from functions.algorithms.kl import kl_loss, reward_kl
from functions.algorithms.names import AGGREGATIONS, KL_KINDS
from functions.algorithms.policy_losses import POLICY_LOSSES
from functions.algorithms.registry import call_with
from functions.algorithms.rewards import token_rewards
from functions.algorithms.value_loss import value_loss
from functions.base.samples import Ragged, SampleBatch

# Two groups of two; the first sample: a turn of 2, an answer of 2, a turn of 3.
MASK = torch.tensor([1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0, 0, 1.0])
SEGMENT = torch.tensor([0] * 7 + [1] * 3 + [2] * 3 + [3] * 3)
MASK[13:] = torch.tensor([1.0, 0.0, 1.0])
GROUP, SCORES = torch.tensor([0, 0, 1, 1]), torch.tensor([1.0, 0.25, -0.5, 2.0])


def noise(seed: int, under: float) -> Tensor:
    """Numbers that are the same where the mask is 1, whatever stands `under` it."""
    values = torch.randn(len(MASK), generator=torch.Generator().manual_seed(seed)) * 0.1 - 1.0
    return torch.where(MASK == 1, values, torch.tensor(under))


def available(under: float) -> dict[str, Any]:
    rewards = token_rewards(scores=SCORES, segment=SEGMENT, mask=MASK, kl=noise(9, under), kl_coef=0.1)
    return {
        "scores": SCORES, "group": GROUP, "segment": SEGMENT, "mask": MASK, "rewards": rewards,
        "values": noise(1, under), "baselines": torch.tensor([0.5, 0.5, 0.1, 0.1]), "old_logprobs": noise(2, under),
        "reference_logprobs": noise(3, under), "logprobs": noise(4, under), "advantages": noise(5, under),
        "turn_rewards": torch.where(MASK == 1, noise(6, 0.0).abs(), torch.tensor(under)), "anchors": noise(7, under),
        "totals": batch_totals(mask=MASK, segment=SEGMENT, num_sequences=4, norm=8.0), "kind": "k3", "coef": 0.1,
        "old_values": noise(8, under), "returns": noise(9, under), "components": torch.stack((SCORES, -SCORES), -1),
        "component_weights": torch.ones(2),
    }  # fmt: skip


def served(functions: Mapping[str, Callable[..., Any]]) -> list[str]:
    """Those that want nothing else; others have tests of their own for what is special about them."""
    found = []
    for name, function in functions.items():
        wanted = {n for n, p in inspect.signature(function).parameters.items() if p.default is inspect.Parameter.empty}
        if wanted <= {*available(0.0), "aggregation"}:
            found.append(name)
    return found


UNDER = (0.0, 7.0, float("nan"), float("inf"))


@pytest.mark.parametrize("name", served(ADVANTAGES))
def test_what_was_given_changes_no_advantage(name: str) -> None:
    found = [call_with(ADVANTAGES[name], available(under)) for under in UNDER]
    for estimate in found:
        assert torch.equal(estimate.advantages, found[0].advantages)
        assert torch.equal(estimate.returns, found[0].returns)
        assert not estimate.advantages[MASK == 0].any()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", [*served(POLICY_LOSSES), *(f"kl {kind}" for kind in KL_KINDS), "value"])
def test_what_was_given_changes_no_loss_and_no_gradient(name: str, aggregation: str) -> None:
    found = []
    for under in UNDER:
        given = available(under) | {"aggregation": aggregation}
        trained = "values" if name == "value" else "logprobs"
        given[trained] = given[trained].clone().requires_grad_()
        if name.startswith("kl "):
            loss, _ = call_with(kl_loss, given | {"kind": name.removeprefix("kl ")})
        else:
            loss, _ = call_with(value_loss if name == "value" else POLICY_LOSSES[name], given)
        (gradient,) = torch.autograd.grad(loss, given[trained])
        found.append((loss.detach(), gradient))
    for loss, gradient in found:
        assert torch.equal(loss, found[0][0])
        assert torch.equal(gradient, found[0][1])
        assert not gradient[MASK == 0].any()


def test_kl_in_the_reward_is_of_what_was_said() -> None:
    found = [
        reward_kl(logprobs=noise(1, u), reference_logprobs=noise(2, u), segment=SEGMENT, mask=MASK, kind="k1")
        for u in UNDER
    ]
    assert all(torch.equal(kl, found[0][0]) and mean == found[0][1] for kl, mean in found)


def test_a_reward_after_a_tool_reaches_what_was_said_before_it() -> None:
    """By hand: gamma 0.5, lambda 1, values 0. The steps over what was given cost no discount."""
    mask = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0])
    segment = torch.zeros(5, dtype=torch.long)
    rewards = token_rewards(scores=torch.tensor([8.0]), segment=segment, mask=mask)
    assert rewards.tolist() == [0, 0, 0, 0, 8]
    place = {"segment": segment, "mask": mask, "rewards": rewards}
    estimate = ADVANTAGES["gae"](**place, values=torch.zeros(5), gamma=0.5, lam=1.0, whiten_advantages=False)
    assert estimate.advantages.tolist() == [2, 4, 0, 0, 8]
    assert call_with(ADVANTAGES["remax"], place | {"baselines": torch.zeros(1)}).advantages.tolist() == [8, 8, 0, 0, 8]


def test_rewards_of_turns_lie_where_they_were_earned() -> None:
    """Of a score of 3, 0.5 was earned in the first turn and 1 in the second: the rest is the last one's too."""
    mask, segment = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]), torch.zeros(5, dtype=torch.long)
    earned = torch.tensor([0.0, 0.5, 7.0, 0.0, 1.0])
    rewards = token_rewards(scores=torch.tensor([3.0]), segment=segment, mask=mask, turn_rewards=earned)
    assert rewards.tolist() == [0, 0.5, 0, 0, 2.5]


def test_turns_of_a_batch() -> None:
    """By hand; a turn that goes to the end of one sample and one that begins the next are two."""
    rows = [[1, 1, 0, 1], [], [0, 0], [1, 0, 0, 1, 1]]
    lengths = np.array([len(row) for row in rows], np.int32)
    mask = np.concatenate([np.asarray(row, np.float32) for row in rows])
    batch = SampleBatch.of_prompts([[1]], samples_per_prompt=4, version=0)
    zeros = np.zeros(int(lengths.sum()), np.float32)
    batch = dataclasses.replace(batch, responses=Ragged(zeros.astype(np.int32), lengths), logprobs=zeros, mask=mask)
    assert [row.tolist() for row in batch.turns.rows()] == [[0, 0, -1, 1], [], [-1, -1], [0, -1, -1, 1, 1]]


def reference(rows: list[dict[str, Any]], gamma: float, weight: float, divide: bool) -> list[float]:
    """verl-agent's way: a row for each turn, dictionaries, loops (gigpo/core_gigpo.py, mode mean_std_norm / mean_norm;
    with numbers of 64 bits)."""
    for at, row in reversed([*enumerate(rows)]):
        following = rows[at + 1] if at + 1 < len(rows) and rows[at + 1]["sample"] == row["sample"] else None
        row["return"] = row["reward"] + (gamma * following["return"] if following else 0.0)
    peers: dict[Any, list[float]] = defaultdict(list)
    for row in rows:
        peers["episode", row["group"]].append(row["score"])
        peers["turn", row["group"], row["anchor"]].append(row["return"])

    def normed(value: float, of: list[float]) -> float:
        deviation = np.std(of, ddof=1) + 1e-6 if len(of) > 1 and divide else 1.0
        return float((value - np.mean(of)) / deviation)

    return [
        normed(row["score"], peers["episode", row["group"]])
        + weight * normed(row["return"], peers["turn", row["group"], row["anchor"]])
        for row in rows
    ]


@pytest.mark.parametrize(("gamma", "weight", "divide"), [(0.95, 1.0, True), (1.0, 0.5, False)])
def test_gigpo_is_verl_agents(gamma: float, weight: float, divide: bool) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        flat: dict[str, list[float]] = {"segment": [], "mask": [], "turn_rewards": [], "anchors": []}
        rows: list[dict[str, Any]] = []
        samples = int(rng.integers(4, 10))
        for sample in range(samples):
            for turn in range(int(rng.integers(1, 5))):
                said, given = int(rng.integers(1, 4)), int(rng.integers(1, 3)) if turn else 0
                reward, anchor = float(rng.integers(0, 8)) / 4, float(rng.integers(1, 3)) if turn else 0.0
                flat["segment"] += [sample] * (given + said)
                flat["mask"] += [0.0] * given + [1.0] * said
                flat["turn_rewards"] += [9.0] * given + [0.0] * (said - 1) + [reward]
                flat["anchors"] += [8.0] * given + [anchor] + [0.0] * (said - 1)
                rows.append({"sample": sample, "group": sample % 2, "reward": reward, "anchor": anchor, "said": said})
        totals = [sum(row["reward"] for row in rows if row["sample"] == sample) for sample in range(samples)]
        for row in rows:
            row["score"] = totals[row["sample"]]
        wanted = reference(rows, gamma, weight, divide)
        tensors: dict[str, Any] = {
            n: torch.tensor(v, dtype=torch.long if n == "segment" else torch.float32) for n, v in flat.items()
        }
        estimate = gigpo(
            scores=torch.tensor(totals), group=torch.arange(samples) % 2, gamma=gamma, step_weight=weight,
            divide=divide, **tensors,
        )  # fmt: skip
        by_token = [value for row, value in zip(rows, wanted, strict=True) for _ in range(row["said"])]
        trained = tensors["mask"] == 1
        np.testing.assert_allclose(estimate.advantages[trained].numpy(), by_token, atol=1e-6, rtol=1e-6)
        assert not estimate.advantages[~trained].any()
