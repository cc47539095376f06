"""What episodes do, learned for each environment: how long they wait for answers, and what follows from it.

An answer's seconds are those from the end of a turn until its sample can go on, whoever was slow. Their distribution is
kept, not its mean: tools have heavy tails. Before anything was seen a replica that waits stays for as long as another
one would take to start (ski rental: Karlin et al., "Competitive snoopy caching", Algorithmica 1988), which is at most
twice what the best decision would have cost; with a distribution it stays while waiting is expected to be cheaper than
that start (Karlin et al., "Competitive randomized algorithms for nonuniform problems", Algorithmica 1994, section 4).
"""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from orchestrator.planner.arrays import Array
from orchestrator.planner.base import Prompt, Resume, Waits
from orchestrator.planner.latency import GenerateCost

KEPT = 4096
"""Of each environment: the latest steps' quantiles (planner/lengths.py keeps as many ratios)."""
QUANTILES = 129
"""Of what a step saw of an environment, at most."""
MOMENTS = 17
"""Times that are compared at which a replica that waits may go."""
EARLY = 0.05
"""Probability that the episodes end in time from which on training gets its ranks: if they do not, its ranks wait; if
they do and it had none, the step waits for a whole update. Of 0.01 to 0.25 the greatest that cost no time
(bench/agents.py)."""
OBJECT_S = 0.004
"""To write or read one object, however small, as measured on the local platform (HAND_OVER_S, planner/adaptive.py)."""


def thinned(values: Sequence[float]) -> list[float]:
    """Ascending; QUANTILES of them where there are more."""
    found: Array = np.sort(np.asarray(values, np.float64))
    if len(found) > QUANTILES:
        found = np.quantile(found, np.linspace(0, 1, QUANTILES)).astype(np.float64)
    return [round(value, 4) for value in found.tolist()]


class EpisodeModel:
    def __init__(self) -> None:
        self._seen: dict[str, list[deque[float]]] = {}
        """Turns, seconds of answers, their totals."""

    def observe(self, waits: Mapping[str, Waits]) -> None:
        for name, seen in waits.items():
            kept = self._seen.setdefault(name, [deque(maxlen=KEPT) for _ in range(3)])
            for values, more in zip(kept, (seen.turns, seen.answer_s, seen.total_s), strict=True):
                values.extend(more)

    def waits(self) -> dict[str, Waits]:
        return {name: Waits(*map(thinned, kept)) for name, kept in self._seen.items()}

    def totals(self, prompts: Sequence[Prompt], n: int, seed: int) -> Array:
        """Seconds that each of n samples of each prompt will wait in all: as seen, spread evenly and dealt out at
        random; 0 where nothing was seen. [P * n]"""
        names = np.repeat([prompt.environment for prompt in prompts], n)
        found = np.zeros(len(names))
        for name, (_, _, values) in self._seen.items():
            rows = np.flatnonzero(names == name)
            places = (np.random.default_rng((seed, len(rows))).permutation(len(rows)) + 0.5) / max(1, len(rows))
            found[rows] = np.sort(np.array(values))[(places * len(values)).astype(np.int64)]
        return found


def stays_s(waiting: Mapping[str, Sequence[float]], waits: Mapping[str, Waits], start_s: float) -> float:
    """How long a replica with nothing to do stays before it goes; `start_s`: until another one is there.

    `waiting`: for how long each episode has waited for its answer, by environment. Never more than `start_s`, whatever
    was learned. Minimises E[min(X, t)] + start_s P(X > t), X: until the next answer.
    """
    known = {name: seconds for name, seconds in waiting.items() if seconds and name in waits and waits[name].answer_s}
    if start_s <= 0 or (not known and any(waiting.values())):
        return start_s
    moments = np.linspace(0.0, start_s, MOMENTS)
    nothing = np.zeros(MOMENTS)
    """Logarithm of the probability that no answer has come by then."""
    for name, seconds in known.items():
        seen, waited = np.asarray(waits[name].answer_s, np.float64), np.asarray(seconds, np.float64)
        longer = len(seen) - np.searchsorted(seen, waited[:, None] + moments, side="right")
        judged = longer[:, 0] > 0  # what has waited for longer than anything did says nothing
        nothing += np.log(np.maximum(longer[judged], 0.5) / longer[judged, :1]).sum(axis=0)
    left = np.exp(nothing)
    waited_s = np.concatenate(([0.0], np.cumsum(0.5 * (left[1:] + left[:-1]) * np.diff(moments))))
    return float(moments[int(np.argmin(waited_s + start_s * left))])


def ended_within(seconds: float, waited: Sequence[tuple[str, float]], waits: Mapping[str, Waits]) -> float:
    """The probability that all of these episodes have their last answer by then; each by its environment and how long
    it has waited in all. What has waited for longer than anything did will, heavy tails being such, be as likely as not
    to wait for as long again."""
    found = 1.0
    for name, already in waited:
        seen = np.asarray(waits[name].total_s if name in waits else (), np.float64)
        longer = seen[seen > already]
        if len(longer):
            found *= float(np.mean(longer <= already + seconds))
        elif already > 0:
            found *= seconds / (already + seconds)
    return found


def resume_cost(cost: GenerateCost) -> Resume:
    """What it takes a sample to go on after a cut, and from how many tokens on its keys and values are worth moving:
    written and read, against computed again. What a replica still holds (vLLM's prefix cache) costs neither."""
    moved_s = None if cost.moved_token_s is None else 2 * cost.moved_token_s
    if moved_s is None or moved_s >= cost.prefill_token_s:
        return Resume(None, cost.call_s, cost.prefill_token_s)
    keep_from = int(2 * OBJECT_S / (cost.prefill_token_s - moved_s)) + 1
    return Resume(keep_from, cost.call_s, moved_s)
