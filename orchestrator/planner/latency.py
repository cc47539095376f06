"""How long a function's work takes, as a linear model of counts: a roofline before anything was seen, least squares on
what was observed after.

Generate, continuous batching. A decode step with n sequences that hold m tokens of keys and values takes
a + b n + c m seconds. Summed over a call in which sample i has prompt P_i and response L_i:

    decode_s = a * steps + b * sum L_i + c * sum (P_i L_i + L_i^2 / 2)

whatever the order, because sample i is part of exactly L_i steps and holds P_i + t tokens in its t-th. Only `steps`
depends on the schedule: the longest response when all samples have a slot, more when they queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from orchestrator.planner.arrays import Array
from orchestrator.planner.devices import Device, ModelShape


@dataclass(frozen=True)
class GenerateCost:
    """Coefficients of one replica of `generate`; all in seconds per unit."""

    call_s: float
    """Per call: accept, load what is held, write results."""
    prefill_token_s: float
    step_s: float
    """a: per decode step, whatever is in it."""
    sequence_s: float
    """b: per sequence in a decode step."""
    kv_token_s: float
    """c: per token of keys and values read in a decode step."""
    moved_token_s: float | None = None
    """Per token whose keys and values are written to the exchange at a cut, or taken up from it; None: what was cut is
    computed again."""

    @property
    def moved(self) -> GenerateCost:
        """Of a call for samples that were cut elsewhere: their keys and values come instead of being computed."""
        return self if self.moved_token_s is None else replace(self, prefill_token_s=self.moved_token_s)

    def decode_s(self, steps: float, tokens: float, kv_token_steps: float) -> float:
        return self.step_s * steps + self.sequence_s * tokens + self.kv_token_s * kv_token_steps

    def work_s(self, prefill_tokens: float, steps: float, tokens: float, kv_token_steps: float) -> float:
        """A whole call."""
        return self.call_s + self.prefill_token_s * prefill_tokens + self.decode_s(steps, tokens, kv_token_steps)


@dataclass(frozen=True)
class WorkCost:
    """Coefficients of one replica of reward, reference, a critic or train; all in seconds per unit."""

    call_s: float
    sample_s: float
    token_s: float
    """Per token, prompt and response."""
    shared_s: float = 0.0
    """Per call of a gang: what its ranks share of reading and writing weights and optimizer state."""
    first_s: float = 0.0
    """More for the first call of a replica: it loads."""

    def work_s(self, samples: float, tokens: float) -> float:
        return self.call_s + self.sample_s * samples + self.token_s * tokens

    def times(self, passes: int) -> WorkCost:
        """Of so many passes over the same samples."""
        call_s, sample_s, token_s = passes * self.call_s, passes * self.sample_s, passes * self.token_s
        return WorkCost(call_s, sample_s, token_s, passes * self.shared_s, self.first_s)

    def ranked_s(self, samples: float, tokens: float, ranks: int) -> float:
        """Of a gang: the work is shared, what every call takes is not."""
        return self.work_s(samples / ranks, tokens / ranks) + self.shared_s / ranks

    def own_s(self, ranks: int) -> float:
        """Of a gang's call, without its samples."""
        return self.call_s + self.shared_s / ranks


def kv_token_steps(prompt_tokens: Array, response_tokens: Array) -> Array:
    """Tokens of keys and values that each sample's decode steps read, added up: P L + L^2 / 2. [S]"""
    return prompt_tokens * response_tokens + 0.5 * response_tokens**2


def generate_prior(
    gpu: Device, model: ModelShape, tensor_parallel: int = 1, *, call_s: float = 0.0, link_gb_s: float | None = None
) -> GenerateCost:
    """Roofline: weights and keys/values at their share of the bandwidth, prefill at its share of the FLOP/s, keys and
    values of a cut's samples at `link_gb_s` per GPU (None: they do not move).

    On more GPUs than there are key heads each head is held, and read, by several.
    """
    bandwidth = gpu.peak_tb_s * 1e12 * tensor_parallel
    reduces = 2 * model.layers if tensor_parallel > 1 else 0
    copies = max(1.0, tensor_parallel / model.kv_heads)
    token_s = reduces * model.hidden * model.bytes_per_value * gpu.allreduce_byte_s
    kv_bytes = copies * model.kv_bytes_per_token
    return GenerateCost(
        call_s=call_s,
        prefill_token_s=_forward_token_s(gpu, model, tensor_parallel) + token_s,
        step_s=model.weight_bytes / (bandwidth * gpu.weights_fraction) + reduces * gpu.allreduce_s,
        sequence_s=token_s,  # what a sequence costs beyond this and its keys and values is inside kv_fraction
        kv_token_s=kv_bytes / (bandwidth * gpu.kv_fraction),
        moved_token_s=None if link_gb_s is None else kv_bytes / (1e9 * link_gb_s * tensor_parallel),
    )


def forward_prior(gpu: Device, model: ModelShape, gpus: int = 1, *, call_s: float = 0.0) -> WorkCost:
    """A forward pass over given tokens (reference log-probabilities, values, a reward model): 2 FLOP a parameter."""
    return WorkCost(call_s, 0.0, _forward_token_s(gpu, model, gpus))


def train_prior(
    gpu: Device, model: ModelShape, gpus: int = 1, *, call_s: float = 0.0, recompute: bool = True
) -> WorkCost:
    """Forward and backward, 6 FLOP a parameter and token, 8 with the forward recomputed (checkpointing)."""
    return WorkCost(call_s, 0.0, (4.0 if recompute else 3.0) * _forward_token_s(gpu, model, gpus))


def start_prior_s(gpus: int, model: ModelShape, *, process_s: float, load_gb_s: float) -> float:
    """From zero to ready: the process and its engine, and the weights at `load_gb_s` per GPU's link."""
    return process_s + model.weight_bytes / 1e9 / (load_gb_s * gpus)


def _forward_token_s(gpu: Device, model: ModelShape, gpus: int) -> float:
    return 2.0 * model.parameters / (gpu.peak_tflops * 1e12 * gpu.prefill_fraction * gpus)


class LinearFit:
    """y ~ x . theta with theta >= 0: least squares on relative errors, older rows forgotten, drawn to a prior.

    minimise  sum_i d^(now - i) ((y_i - x_i . theta) / s_i)^2  +  k sum_j ((theta_j - prior_j) / prior_j)^2

    s_i is what was believed of row i when it came, within [y_i / 2, 2 y_i] (of the first rows y_i itself). Divided by
    y_i, rows that took long by chance would count less, and every prediction would be low: by 2 v of rows whose
    relative variance is v, 8 % where times scatter by 20 %.

    Negative coefficients are set to 0 and the others solved again (the active set of non-negative least squares,
    entered once: the features are counts, so a second entry changes little). A prior of 0 has no weight: its
    coefficient is learned from a ridge so weak that it only decides between collinear features.
    """

    def __init__(self, features: int, prior: Sequence[float] | None = None, *, decay: float = 0.7, k: float = 0.1):
        if prior is not None and len(prior) != features:
            raise ValueError(f"prior has {len(prior)} coefficients, the model has {features}")
        self.theta: Array | None = None if prior is None else np.array(prior, dtype=np.float64)
        self.prior = self.theta
        self.decay = decay
        self.k = k
        self.gram = np.zeros((features, features))
        self.moment = np.zeros(features)

    def observe(self, x: Array, y: Array) -> None:
        """Rows of one step: x [R, features], y [R] seconds. Rows with y <= 0 say nothing and are left out."""
        at = y > 0
        if not at.any():
            return
        x, y = x[at], y[at]
        scale = y if self.theta is None else np.clip(x @ self.theta, 0.5 * y, 2.0 * y)
        self.gram = self.decay * self.gram + (x / scale[:, None]).T @ (x / scale[:, None])
        self.moment = self.decay * self.moment + (x / scale[:, None]).T @ (y / scale)
        self.theta = self._solve()

    def predict(self, x: Array) -> Array:
        """Seconds for rows x [R, features]. Raises ValueError before there is a prior or an observation."""
        if self.theta is None:
            raise ValueError("no prior and nothing observed: this function's time cannot be predicted yet")
        return x @ self.theta

    def _solve(self) -> Array:
        gram, moment = self.gram.copy(), self.moment.copy()
        ridge = 1e-6 * np.maximum(np.diag(gram), 1e-30)
        target = np.zeros(len(moment))
        if self.prior is not None:
            known = self.prior > 0
            ridge[known] = self.k / self.prior[known] ** 2
            target[known] = self.prior[known]
        gram += np.diag(ridge)
        moment += ridge * target
        active = np.diag(self.gram) > 0
        if self.prior is not None:
            active |= self.prior > 0
        theta = np.zeros(len(moment))
        while active.any():
            theta[:] = 0.0
            theta[active] = np.linalg.solve(gram[np.ix_(active, active)], moment[active])
            if (theta >= 0).all():
                break
            active &= theta > 0
        return theta


def relative_errors(predicted: Array, measured: Array) -> Array:
    """|predicted - measured| / measured, where something was measured. [<= R]"""
    at = measured > 0
    return np.abs(predicted[at] - measured[at]) / measured[at]
