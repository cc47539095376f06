"""From logits to tokens: temperature, top-k, top-p, and a random stream per sample that no neighbour touches.

The uniform number of response position t of sample (group, index) is a pure function of (seed, group, index, t): the
t-th output of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, fig. 17)
started at a key that is itself an output: number `index` of the generator started at output `group` of the one started
at the seed's first output. Nothing is carried from step to step, so a
sample that is cut here goes on there with the same stream.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from functions.algorithms.penalties import NO_PENALTIES, History, penalized
from functions.algorithms.truncation import truncated
from functions.generate.engine.base import Sampling

U64 = npt.NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MASK = 0xFFFFFFFFFFFFFFFF


def _mix(z: U64) -> U64:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def stream_keys(seed: int, group: npt.NDArray[np.int64], index: npt.NDArray[np.int64]) -> U64:
    """The key of each sample's stream, [S]. Equal only for equal (seed, group, index), up to 64-bit collisions."""
    key = np.full(len(group), seed & _MASK, np.uint64)
    for part in (np.zeros_like(group), group, index):
        key = _output(key, part)
    return key


def _output(key: U64, number: npt.NDArray[np.int64]) -> U64:
    """Output `number` (from 0) of the generator that starts at `key`."""
    return _mix(key + (number.astype(np.uint64) + np.uint64(1)) * _GAMMA)


def bits(keys: U64, position: npt.NDArray[np.int64]) -> U64:
    """64 random bits for each (key, response position), [S]."""
    return _mix(keys + (position.astype(np.uint64) + np.uint64(1)) * _GAMMA)


def uniforms(keys: U64, position: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Uniform numbers k / 2^24 in [0, 1), one for each (key, response position), [S]."""
    return (bits(keys, position) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def distribution(logits: Tensor, sampling: Sampling, history: History | None = None) -> Tensor:
    """ln of the distribution that is sampled from, [S, V] in float32: -inf where min-p, top-k or top-p leave one out.

    Order as in vLLM: penalties, temperature, min-p, top-k, then top-p (algorithms/truncation.py), renormalised once at
    the end. Greedy (temperature 0) reports log-probabilities at temperature 1.
    """
    logits = logits.float()
    if history is not None and sampling.penalties != NO_PENALTIES:
        logits = penalized(logits, sampling.penalties, history)
    if sampling.temperature not in (0.0, 1.0):
        logits = logits / sampling.temperature
    if sampling.temperature == 0.0:
        return torch.log_softmax(logits, -1)
    return torch.log_softmax(truncated(logits, sampling.truncation), -1)


def draw(logits: Tensor, uniform: Tensor, sampling: Sampling, history: History | None = None) -> tuple[Tensor, Tensor]:
    """One token per row and its ln p. logits [S, V], uniform [S] in [0, 1) -> int64 [S], float32 [S].

    `history` of the rows is what penalties look at.

    Inverse transform: the first token at which the cumulated probability exceeds u times the total; u < 1 makes the
    product smaller than the total, so a token of probability 0 is never taken.
    """
    log_p = distribution(logits, sampling, history)
    if sampling.temperature == 0.0:
        token = log_p.argmax(-1)
    else:
        mass = log_p.exp().cumsum_(-1)
        token = torch.searchsorted(mass, (uniform * mass[:, -1])[:, None], right=True)[:, 0]
    return token, log_p.gather(-1, token[:, None])[:, 0]
