"""What a train call tells of its memory and of how evenly its tokens lie on the ranks, under verl's names.

perf/max_memory_allocated_gb, perf/max_memory_reserved_gb   of the GPU, since the call began; the greatest of the ranks
perf/cpu_memory_used_gb                                     resident memory of the process; the greatest of the ranks
global_seqlen/min, max, minmax_diff, mean                   tokens of a rank, were the samples dealt in their order
global_seqlen/balanced_min, balanced_max                    what the ranks did compute, packed by weight

(verl/workers/engine_workers.py, verl/utils/seqlen_balancing.py: log_seqlen_unbalance.) GB are 2**30 bytes, as there.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from functions.call.train_params import TrainParams
from functions.train.batch import TrainBatch, length_metrics
from functions.train.gang import Ranks
from functions.train.state import TrainState
from functions.train.update import told

GB = 2.0**30
STATM = Path("/proc/self/statm")
PAGE = 4096


def reset_peak(device: torch.device) -> None:
    """Peaks are counted from here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory(device: torch.device, ranks: Ranks) -> dict[str, float]:
    """The perf/* of the call; asked of all ranks at once."""
    own: dict[str, float] = {}
    if STATM.exists():
        own["perf/cpu_memory_used_gb"] = int(STATM.read_text().split()[1]) * PAGE / GB
    if device.type == "cuda":
        own["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(device) / GB
        own["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(device) / GB
    parts = ranks.gather(own)
    return {name: max(part[name] for part in parts) for name in own}


def rank_tokens(state: TrainState, batch: TrainBatch, worked: int) -> dict[str, float]:
    """The global_seqlen/* of a batch, of which this rank has computed `worked` tokens; asked of all ranks at once."""
    lengths = batch.samples.token_counts
    computed = [int(part["tokens"]) for part in state.ranks.gather({"tokens": worked}, "dp")]
    return sequence_lengths([int(lengths[row]) for row in batch.trained_rows()], computed)


def skipped(
    state: TrainState, batch: TrainBatch, params: TrainParams
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """(metrics, stats, carry) of a step that has nothing to train: every response is dropped, empty, masked, filtered
    out or rejected. The next version has the same weights, and the job goes on: resume would come to the same step."""
    prefix = "actor" if params.objective == "policy" else "critic"
    metrics, scores = dict[str, float](), batch.sample.get(params.score.column)
    if len(batch.samples):
        metrics = length_metrics(batch.samples)
    if scores is not None and len(scores):
        metrics["critic/score/mean"] = float(scores.double().mean())
    metrics, stats = told(state, batch, metrics | {f"{prefix}/skipped_updates": 1.0, f"{prefix}/grad_norm": 0.0})
    stats |= {"optimizer_steps": 0, "packs": 0, "computed_tokens": 0, "shared_prefix": 0}
    return metrics, stats | rank_tokens(state, batch, 0), state.carry


def sequence_lengths(tokens: Sequence[int], computed: Sequence[int]) -> dict[str, float]:
    """`tokens` of each sample, prompt included, in their order; `computed` by each rank."""
    dealt = [float(part.sum()) for part in np.array_split(np.array(tokens, np.float64), len(computed))]
    return {
        "global_seqlen/min": min(dealt),
        "global_seqlen/max": max(dealt),
        "global_seqlen/minmax_diff": max(dealt) - min(dealt),
        "global_seqlen/mean": sum(dealt) / len(dealt),
        "global_seqlen/balanced_min": float(min(computed)),
        "global_seqlen/balanced_max": float(max(computed)),
    }
