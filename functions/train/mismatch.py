"""What training says of each sample: the mean advantage of its tokens, and how far its log-probabilities by the trainer
lie from the engine's: mean |old - rollout| of its tokens, both of the distribution that was sampled from.

The batch's own number is rollout_corr/abs_diff_mean (algorithms/correction.py); this says which samples it comes from.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from functions.base.samples import Columns
from functions.models.packing import Pack
from functions.train.batch import TrainBatch
from functions.train.gang import Ranks


def note(batch: TrainBatch, pack: Pack, old: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Writes the pack's samples into `batch.mismatch` and `.advantage`. All tensors are the pack's tokens'. [N]

    A sample is in one pack only, and `old` the same in every epoch, so that it does not matter how often.
    """
    mask, rows = tensors["mask"], list(pack.rows)
    counts = torch.zeros(batch.count, device=old.device).index_add_(0, tensors["segment"], mask)
    for said, values in (
        (batch.mismatch, (old - tensors["rollout_logprobs"]).abs()),
        (batch.advantage, tensors["advantages"]),
    ):
        sums = torch.zeros_like(counts).index_add_(0, tensors["segment"], values.float() * mask)
        said[rows] = (sums / counts)[rows].cpu()  # of no trained token: nan


def mismatch_columns(batches: Sequence[TrainBatch], ranks: Ranks) -> Columns:
    """Sample columns `mismatch` and `advantage` of all trained samples, whichever rank had them; in the order (group,
    index)."""
    own: list[tuple[int, int, float, float]] = []
    for batch in batches:
        said = zip(batch.samples.keys, batch.mismatch.tolist(), batch.advantage.tolist(), strict=True)
        own += [(*key, off, advantage) for key, off, advantage in said if np.isfinite(off)]
    parts = ranks.gather({"samples": own})
    whole = sorted({(row[0], row[1]): tuple(row) for part in parts for row in part["samples"]}.values())
    group, index = (np.array([row[k] for row in whole], np.int32) for k in (0, 1))
    found = {name: np.array([row[k] for row in whole], np.float32) for k, name in ((2, "mismatch"), (3, "advantage"))}
    return Columns(group, index, np.zeros(len(whole), np.int32), sample=found)
