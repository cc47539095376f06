"""What training says of each sample: the mean advantage of its tokens, and how far its log-probabilities by the trainer
lie from the engine's: mean |old - rollout| of its tokens, both of the distribution that was sampled from. Of the first
samples that of each token.

The batch's own number is rollout_corr/abs_diff_mean (algorithms/correction.py); this says which samples it comes from.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from functions.base.samples import Columns, Ragged
from functions.models.packing import Pack
from functions.train.batch import TrainBatch
from functions.train.gang import Ranks

TOLD = 64
"""Samples whose tokens are told: as many as a run keeps of a step (telemetry.samples)."""


def note(batch: TrainBatch, pack: Pack, old: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Writes the pack's samples into `batch.mismatch` and `.advantage`. All tensors are the pack's tokens'. [N]

    A sample is in one pack only, and `old` the same in every epoch, so that it does not matter how often.
    """
    mask, rows = tensors["mask"], list(pack.rows)
    off = old - tensors["rollout_logprobs"]
    batch.difference[pack.flat.cpu()] = off.float().where(mask == 1, torch.nan).cpu()
    counts = torch.zeros(batch.count, device=old.device).index_add_(0, tensors["segment"], mask)
    for said, values in ((batch.mismatch, off.abs()), (batch.advantage, tensors["advantages"])):
        sums = torch.zeros_like(counts).index_add_(0, tensors["segment"], values.float() * mask)
        said[rows] = (sums / counts)[rows].cpu()  # of no trained token: nan


def mismatch_columns(batches: Sequence[TrainBatch], ranks: Ranks) -> Columns:
    """Sample columns `mismatch` and `advantage` of all trained samples, whichever rank had them; in the order (group,
    index). Token column `difference`, of the first TOLD of them; the others have no tokens here."""
    own: list[tuple[Any, ...]] = []
    for batch in batches:
        rows = Ragged(batch.difference.numpy(), batch.samples.responses.lengths).rows()
        said = zip(batch.samples.keys, batch.mismatch.tolist(), batch.advantage.tolist(), rows, strict=True)
        own += [(*key, *values) for key, *values in said if np.isfinite(values[0])]
    own.sort(key=lambda sample: sample[:2])
    parts = ranks.gather({"samples": [s[:4] for s in own], "tokens": [s[4].tolist() for s in own[:TOLD]]})
    both: list[tuple[Any, Any]] = [
        pair for part in parts for pair in zip_longest(part["samples"], part["tokens"], fillvalue=())
    ]
    whole = sorted({(sample[0], sample[1]): (tuple(sample), tokens) for sample, tokens in both}.values())
    group, index = (np.array([sample[k] for sample, _ in whole], np.int32) for k in (0, 1))
    found = {name: np.array([s[k] for s, _ in whole], np.float32) for k, name in ((2, "mismatch"), (3, "advantage"))}
    told = Ragged.from_rows([tokens if k < TOLD else () for k, (_, tokens) in enumerate(whole)], np.float32)
    return Columns(group, index, told.lengths, sample=found, token={"difference": told.flat})
