"""Is a run learning as it should: a few numbers of its last step against bounds, each with its reason in words.

Bounds are rules of thumb of GRPO and PPO practice but for the mismatch, whose bound is the job's own
(algorithm.max_rollout_logprob_diff, docs/train.md). What a run does not measure is left out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["good", "warn", "bad"]
Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Sign:
    """One of them. `value` as a person reads it, `reason` with the bound."""

    name: str
    level: Level
    value: str
    reason: str


def health(rows: Sequence[Metrics], mismatch_bound: float | None) -> list[Sign]:
    """Of the last training step of a run's metrics, oldest first; [] before the first."""
    trained = [row for row in rows if "critic/score/mean" in row or "actor/ppo_kl" in row]  # not on what data gave
    if not trained:
        return []
    found = [_skipped, _clipped, _cut_off, _without_variance, _entropy, _kl]
    signs = [sign for of in found if (sign := of(trained)) is not None]
    return [*signs, *_mismatch(trained[-1], mismatch_bound)]


def _level(value: float, warn: float, bad: float) -> Level:
    return "bad" if value >= bad else "warn" if value >= warn else "good"


def _share(name: str, metric: str, warn: float, bad: float, what: str) -> Callable[[Sequence[Metrics]], Sign | None]:
    def of(rows: Sequence[Metrics]) -> Sign | None:
        value = rows[-1].get(metric)
        if value is None:
            return None
        return Sign(name, _level(value, warn, bad), _percent(value), f"{what}; good below {_percent(warn)}")

    return of


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _skipped(rows: Sequence[Metrics]) -> Sign | None:
    last = rows[-1]
    count = last.get("actor/skipped_updates", 0.0) + last.get("critic/skipped_updates", 0.0)
    reason = "updates that had nothing to train: every response is empty, masked, filtered out or rejected; good: none"
    return Sign("Skipped updates", "bad", f"{count:.0f}", reason) if count else None


_clipped = _share("Clip ratio", "actor/pg_clipfrac", 0.2, 0.4, "share of the tokens whose gradient the loss clips")
_cut_off = _share("Cut off", "response_length/clip_ratio", 0.1, 0.3, "share of the responses that end at the limit")


def _without_variance(rows: Sequence[Metrics]) -> Sign | None:
    same, groups = rows[-1].get("critic/groups_zero_variance"), rows[-1].get("critic/groups")
    if same is None or not groups:
        return None
    reason = "share of the prompts whose samples all score the same, which teach nothing; good below 50 %"
    return Sign("Same scores", _level(same / groups, 0.5, 0.8), _percent(same / groups), reason)


def _entropy(rows: Sequence[Metrics]) -> Sign | None:
    """Against its mean over the first steps: below a tenth exploration has ended, beyond four times it runs away."""
    seen = [row["actor/entropy"] for row in rows if "actor/entropy" in row]
    if not seen or "actor/entropy" not in rows[-1]:
        return None
    begun = sum(seen[:5]) / len(seen[:5])
    share = seen[-1] / begun if begun > 0 else 1.0
    level: Level = "bad" if share < 0.1 or share > 4 else "warn" if share < 0.3 or share > 2 else "good"
    reason = f"{share:.2g} times that of the first steps ({begun:.3g}); good from 0.3 to 2 times"
    return Sign("Entropy", level, f"{seen[-1]:.3g}", reason)


def _kl(rows: Sequence[Metrics]) -> Sign | None:
    """To the reference where there is a penalty for it, else between the policies before and within the step."""
    last = rows[-1]
    for metric in ("actor/kl_loss", "actor/reward_kl_penalty"):
        if metric in last:
            reason = f"{metric}: to the reference, a token; good below 0.1"
            return Sign("KL", _level(abs(last[metric]), 0.1, 0.5), f"{last[metric]:.3g}", reason)
    if not last.get("actor/ppo_kl"):
        return None  # a single update: the policy is the one that sampled
    reason = "actor/ppo_kl: how far the step has moved the policy, a token; good below 0.02"
    return Sign("KL", _level(abs(last["actor/ppo_kl"]), 0.02, 0.1), f"{last['actor/ppo_kl']:.3g}", reason)


def _mismatch(last: Metrics, bound: float | None) -> list[Sign]:
    value = last.get("rollout_corr/abs_diff_mean")
    if value is None:
        return []
    limit = bound or 0.1
    said = f"bound {limit:.3g}" if bound else f"nothing is refused; {limit:.3g} taken as the bound"
    reason = f"mean difference of engine's and trainer's log-probabilities; good below half of the bound ({said})"
    return [Sign("Mismatch", _level(value, 0.5 * limit, 0.8 * limit), f"{value:.3g}", reason)]
