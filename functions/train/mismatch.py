"""How far each sample's log-probabilities by the trainer lie from the engine's: mean |old - rollout| of its tokens,
both of the distribution that was sampled from.

The batch's own number is rollout_corr/abs_diff_mean (algorithms/correction.py); this says which samples it comes from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from functions.base.samples import Columns
from functions.models.packing import Pack
from functions.train.batch import TrainBatch
from functions.train.gang import Ranks


def note(batch: TrainBatch, pack: Pack, old: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Writes the pack's samples into `batch.mismatch`. All tensors are the pack's tokens'. [N]

    A sample is in one pack only, and `old` the same in every epoch, so that it does not matter how often.
    """
    sums, counts = (torch.zeros(batch.count, device=old.device) for _ in range(2))
    mask = tensors["mask"]
    sums.index_add_(0, tensors["segment"], (old - tensors["rollout_logprobs"]).abs().float() * mask)
    counts.index_add_(0, tensors["segment"], mask)
    rows = list(pack.rows)
    means = (sums / counts)[rows].cpu()  # of no trained token: nan
    batch.mismatch[rows] = means


def mismatch_columns(batches: Sequence[TrainBatch], ranks: Ranks) -> Columns:
    """Sample column `mismatch` of all trained samples, whichever rank had them; in the order (group, index)."""
    own: list[tuple[int, int, float]] = []
    for batch in batches:
        values = batch.mismatch.double().tolist()
        own += [(*key, value) for key, value in zip(batch.samples.keys, values, strict=True) if np.isfinite(value)]
    parts = ranks.gather({"samples": own})
    whole = sorted({(g, i): (g, i, v) for part in parts for g, i, v in part["samples"]}.values())
    group, index = (np.array([row[k] for row in whole], np.int32) for k in (0, 1))
    found = np.array([row[2] for row in whole], np.float32)
    return Columns(group, index, np.zeros(len(whole), np.int32), sample={"mismatch": found})
