"""How long responses will be: per prompt an EWMA over epochs, used as a ranking; a prior for prompts not seen.

RLHFless (arXiv 2602.22718): lengths of adjacent epochs are close for the same prompt, so the EWMA orders prompts well
though it predicts no single sample well. What single samples do around it is kept as a distribution of ratios
actual / predicted, and used wherever a longest sample matters (the mean of a maximum is not the maximum of means).

How far an EWMA is to be trusted is learned as well: ln L ~ w0 + w1 ln EWMA over prompts that came again, drawn to the
EWMA itself. A prompt whose one response was long will most likely have a shorter one next.

Prior of an unseen prompt: ln L ~ w0 + w1 ln(1 + P) per data source (least squares, forgotten slowly), drawn to the mean
of all sources while a source has few prompts. With no history at all any order of magnitude up to the cap is as likely
(what is not known of a positive number is its scale: Jeffreys' prior, uniform in ln L).
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.planner.arrays import Array, Flags
from orchestrator.planner.base import Prompt

RATIOS_KEPT = 4096
DEALS = 5
DECAY = 0.9
"""Of what earlier steps said, a step."""


@dataclass(frozen=True)
class Prediction:
    """Of one step. `mean` [P]: predicted mean length of each prompt's responses, in tokens, within [1, cap]."""

    mean: Array
    seen: Flags
    """[P]: from the prompt's own history."""
    ratios: Array
    """Sorted actual / predicted of recent samples whose prompt had been seen before."""
    cap: int
    unseen_ratios: Array
    """The same of samples whose prompt was new: wider."""

    def at_quantile(self, q: float) -> Array:
        """Length below which a single sample stays with probability q. [P]"""
        known, new = (float(np.quantile(ratios, q)) for ratios in (self.ratios, self.unseen_ratios))
        scaled: Array = np.clip(self.mean * np.where(self.seen, known, new), 1.0, float(self.cap))
        return scaled

    def samples(self, n: int, seed: int) -> Array:
        """A length for each of n samples of each prompt, in sample order: as many ratios as there are samples, evenly
        spread over their distribution, dealt out at random. [P * n]

        Independent draws would now and then have one sample far beyond what a step has, and plan the step for it. For
        the same reason it is the middle one of DEALS such dealings, by their longest samples (a 64th of all).
        """
        deals = sorted((self._dealt(n, np.random.default_rng((seed, k))) for k in range(DEALS)), key=_longest_mean)
        return deals[DEALS // 2]

    def _dealt(self, n: int, dice: np.random.Generator) -> Array:
        lengths: Array = np.repeat(self.mean, n)
        seen = np.repeat(self.seen, n)
        for rows, ratios in ((seen, self.ratios), (~seen, self.unseen_ratios)):
            if count := int(rows.sum()):
                lengths[rows] *= ratios[((dice.permutation(count) + 0.5) / count * len(ratios)).astype(np.int64)]
        return np.clip(lengths, 1.0, float(self.cap))


def _longest_mean(lengths: Array) -> float:
    k = max(1, len(lengths) // 64)
    return float(np.partition(lengths, -k)[-k:].mean())


class _Source:
    """Running least squares of ln L on (1, ln(1 + P)) for one data source."""

    def __init__(self) -> None:
        self.gram = np.zeros((2, 2))
        self.moment = np.zeros(2)

    def observe(self, x: Array, y: Array) -> None:
        self.gram = np.asarray(DECAY * self.gram + x.T @ x)
        self.moment = np.asarray(DECAY * self.moment + x.T @ y)

    def solve(self, toward: Array) -> Array:
        """Coefficients, with the weight of four prompts on `toward`."""
        ridge = np.array([4.0, 16.0])
        return np.asarray(np.linalg.solve(self.gram + np.diag(ridge), self.moment + ridge * toward), np.float64)


class LengthModel:
    def __init__(self, *, alpha: float = 0.5) -> None:
        if not 0.0 < alpha <= 1.0:
            raise ValueError(f"alpha is {alpha} (wants 0 < alpha <= 1)")
        self.alpha = alpha
        self.ewma: dict[int, float] = {}
        self._seen_before = _Source()
        """ln of a prompt's mean against ln of its EWMA: how far the EWMA is to be trusted."""
        self._all = _Source()
        self._by_source: dict[str, _Source] = {}
        self._ratios: dict[bool, deque[float]] = {seen: deque(maxlen=RATIOS_KEPT) for seen in (True, False)}
        self._within: deque[float] = deque(maxlen=RATIOS_KEPT)
        """Sample / mean of its prompt's samples: stands for the ratios of prompts that come again before any has."""
        self._source_of: dict[int, tuple[str, int]] = {}
        self._predicted: dict[int, float] = {}
        self._seen: dict[int, bool] = {}

    def predict(self, prompts: Sequence[Prompt], cap: int) -> Prediction:
        """Mean lengths of the step's prompts. Remembers them, to compare them with what `observe` is told."""
        seen = np.array([p.prompt_id in self.ewma for p in prompts], dtype=np.bool_)
        known_before = np.array([self.ewma.get(p.prompt_id, 1.0) for p in prompts], dtype=np.float64)
        w0, w1 = self._seen_before.solve(np.array([0.0, 1.0]))
        mean: Array = np.exp(w0 + w1 * np.log(np.maximum(known_before, 1.0)))
        if self._all.gram[0, 0] == 0:
            mean[~seen] = max(1.0, (cap - 1.0) / math.log(max(cap, 2)))
        elif not seen.all():
            centre = float(self._all.moment[0] / self._all.gram[0, 0])
            overall = self._all.solve(np.array([centre, 0.0]))
            fits = {name: source.solve(overall) for name, source in self._by_source.items()}
            for row in np.flatnonzero(~seen).tolist():
                w = fits.get(prompts[row].data_source, overall)
                mean[row] = np.exp(w[0] + w[1] * np.log1p(len(prompts[row].tokens)))
        mean = np.clip(mean, 1.0, cap)
        for p, value, known in zip(prompts, mean.tolist(), seen.tolist(), strict=True):
            self._predicted[p.prompt_id] = value
            self._seen[p.prompt_id] = known
            self._source_of[p.prompt_id] = (p.data_source, len(p.tokens))
        known, new = (np.sort(np.array(self._ratios[s], dtype=np.float64)) for s in (True, False))
        if not len(known) and self.ewma:  # without groups a last response is as spread as the next one will be
            known = np.sort(np.array(self._within or [1.0], dtype=np.float64))
        if not self.ewma and len(mean):  # any order of magnitude up to the cap is as likely
            known = new = np.geomspace(1.0, max(cap, 2), 65) / mean[0]
        return Prediction(mean, seen, known, cap, new if len(new) else known)

    def observe(self, lengths: Mapping[int, Sequence[int]]) -> dict[str, float]:
        """Learns from a step's response lengths by prompt_id; returns how what was predicted goes with them."""
        actual = {i: float(np.mean(values)) for i, values in lengths.items() if len(values)}
        pairs = [(self._predicted[i], value) for i, value in actual.items() if i in self._predicted]
        metrics: dict[str, float] = {}
        if len(pairs) >= 2:
            predicted, measured = np.log(np.maximum(np.array(pairs).T, 1.0))
            varied = bool(np.ptp(predicted) and np.ptp(measured))
            metrics["planner/length_r"] = float(np.corrcoef(predicted, measured)[0, 1]) if varied else 0.0
        for values in lengths.values():
            if len(values) > 1:  # a sample is part of its group's mean, which makes it look closer than a new one is
                centre, wider = float(np.mean(values)), (len(values) / (len(values) - 1)) ** 0.5
                self._within.extend(max(0.0, 1.0 + wider * (x / max(centre, 1.0) - 1.0)) for x in values)
        history = self._all.gram[0, 0] > 0
        for i in actual:
            if i in self._predicted and history:
                self._ratios[self._seen[i]].extend(float(length) / self._predicted[i] for length in lengths[i])
        if not history:  # nothing was predicted: the spread around the step's own mean is the first distribution
            centre = float(np.mean([x for values in lengths.values() for x in values])) if actual else 1.0
            self._ratios[False].extend(float(x) / max(centre, 1.0) for values in lengths.values() for x in values)
        self._learn_prior(actual)
        again = [(self.ewma[i], value) for i, value in actual.items() if i in self.ewma]
        if len(again) > 1:
            before, now = np.log(np.maximum(np.array(again).T, 1.0))
            self._seen_before.observe(np.column_stack((np.ones(len(before)), before)), now)
        for i, value in actual.items():
            self.ewma[i] = value if i not in self.ewma else self.alpha * value + (1 - self.alpha) * self.ewma[i]
        self._predicted.clear()
        self._seen.clear()
        return metrics

    def _learn_prior(self, actual: Mapping[int, float]) -> None:
        rows: dict[str, list[tuple[float, float]]] = {}
        for i, value in actual.items():
            if i in self._source_of:
                source, prompt_length = self._source_of[i]
                rows.setdefault(source, []).append((float(np.log1p(prompt_length)), float(np.log(max(value, 1.0)))))
        for source, values in sorted(rows.items()):
            table = np.array(values)
            x = np.column_stack((np.ones(len(table)), table[:, 0]))
            self._by_source.setdefault(source, _Source()).observe(x, table[:, 1])
            self._all.observe(x, table[:, 1])
