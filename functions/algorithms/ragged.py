"""Per-sequence arithmetic on flat ragged tensors: sums, maxima, broadcasts, and the padded form.

A per-token tensor is [N]; `segment: int64 [N]` holds the sequence number of each token, and the tokens of a sequence
are adjacent (a *run*). The numbers need not start at 0 nor ascend: a micro-batch keeps the numbers of its batch.
Sums go through `torch.segment_reduce` in float64: no atomics, so the same on every run and every split.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The sequences present in a flat tensor, in order of appearance."""

    ids: Tensor
    """int64 [R], the sequence number of each run."""
    position: Tensor
    """int64 [N], the run of each token."""
    lengths: Tensor
    """int64 [R], tokens per run."""


def runs(segment: Tensor) -> Runs:
    """Find the runs of `segment` [N]. ValueError where a sequence comes back after another one began."""
    ids, position, lengths = torch.unique_consecutive(segment, return_inverse=True, return_counts=True)
    unique, count = torch.unique(ids, return_counts=True)
    if unique.numel() != ids.numel():
        again = int(unique[count > 1][0])
        raise ValueError(f"segment: the tokens of sequence {again} are not adjacent; a sequence must be one run")
    return Runs(ids=ids, position=position, lengths=lengths)


def run_sums(values: Tensor, found: Runs) -> Tensor:
    """[R]: sum of `values` [N] over each run, added in float64, returned in the dtype of `values`. No gradient."""
    if found.lengths.numel() == 0:
        return values.new_zeros(0)
    return torch.segment_reduce(values.detach().double(), "sum", lengths=found.lengths).to(values.dtype)


def from_lengths(*, lengths: Tensor) -> Tensor:
    """segment int64 [N] of S sequences with `lengths` int64 [S]; an empty sequence (0) has no token."""
    if bool((lengths < 0).any()):
        raise ValueError(f"lengths: must be >= 0, sequence {int((lengths < 0).nonzero()[0, 0])} is negative")
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)


def segment_sum(*, values: Tensor, segment: Tensor, num_sequences: int) -> Tensor:
    """[S]: sum of `values` [N] over each sequence, 0 for a sequence without tokens. No gradient."""
    found = _numbered(segment, num_sequences)
    total = values.new_zeros(num_sequences)
    total[found.ids] = run_sums(values, found)
    return total


def per_token(*, values: Tensor, segment: Tensor) -> Tensor:
    """[N]: the value [S] of each token's sequence."""
    return values[segment]


def to_padded(*, values: Tensor, segment: Tensor, num_sequences: int, fill: float = 0.0) -> Tensor:
    """[S, T]: `values` [N] with one row per sequence, T the longest, `fill` to the right of each."""
    found = _numbered(segment, num_sequences)
    width = int(found.lengths.max()) if found.lengths.numel() else 0
    padded = values.new_full((num_sequences, width), fill)
    padded[segment, _offsets(found)] = values
    return padded


def to_flat(*, padded: Tensor, segment: Tensor) -> Tensor:
    """[N]: the tokens of `padded` [S, T] in the order of `segment`; the inverse of `to_padded`."""
    return padded[segment, _offsets(_numbered(segment, padded.shape[0]))]


def keep_sequences(*, mask: Tensor, segment: Tensor, keep: Tensor) -> Tensor:
    """`mask` [N] with 0 on every token of the sequences where `keep` (bool [S]) is False.

    Uses: overlong filtering (DAPO, arXiv:2503.14476, section 3.4), groups without signal, samples without a score.
    """
    return mask * keep[segment].to(mask.dtype)


def is_trained(mask: Tensor) -> Tensor:
    """bool [N]; ValueError unless `mask` holds only 0 and 1."""
    trained = mask == 1
    if not bool((trained | (mask == 0)).all()):
        raise ValueError("mask: must hold only 0 and 1; weights per token go into `weights`")
    return trained


def checked(name: str, values: Tensor, segment: Tensor, mask: Tensor) -> Tensor:
    """`values` [N] with 0 where `mask` is 0; ValueError naming the sequence where a trained token is not finite.

    The zeros keep a NaN under the mask out of the value and out of the gradient.
    """
    if values.shape != segment.shape or mask.shape != segment.shape:
        raise ValueError(
            f"{name}: shape {tuple(values.shape)} must be that of mask {tuple(mask.shape)} "
            f"and segment {tuple(segment.shape)}"
        )
    trained = is_trained(mask)
    clean = torch.where(trained, values, torch.zeros_like(values))
    bad = ~torch.isfinite(clean.detach())
    if bool(bad.any()):
        token = int(bad.nonzero()[0, 0])
        sequence = int(segment[token])
        within = token - int((segment == sequence).nonzero()[0, 0])
        value = float(values[token])
        raise ValueError(f"{name}: {value} at token {within} of sequence {sequence}; must be finite where mask is 1")
    return clean


def checked_scores(name: str, values: Tensor) -> Tensor:
    """`values` [S] unchanged; ValueError naming the first sequence whose value is not finite."""
    bad = ~torch.isfinite(values)
    if bool(bad.any()):
        sequence = int(bad.nonzero()[0, 0])
        raise ValueError(f"{name}: {float(values[sequence])} at sequence {sequence}; must be finite")
    return values


def _numbered(segment: Tensor, num_sequences: int) -> Runs:
    found = runs(segment)
    if found.ids.numel():
        first, last = int(found.ids.min()), int(found.ids.max())
        if first < 0 or last >= num_sequences:
            raise ValueError(f"segment: numbers {first}..{last} must lie in [0, {num_sequences})")
    return found


def _offsets(found: Runs) -> Tensor:
    """int64 [N]: index of each token within its sequence."""
    starts = found.lengths.cumsum(0) - found.lengths
    return torch.arange(found.position.numel(), device=found.position.device) - starts[found.position]
