"""When each sample of a shard finishes on its replica, in closed form.

With all samples in a slot, sample k (lengths ascending L_1 <= ... <= L_S) finishes after L_k steps, in which sample i
took part in min(L_i, L_k) of them:

    t_k = call + prefill + a L_k + b sum_i min(L_i, L_k) + c sum_i (P_i m_ik + m_ik^2 / 2),   m_ik = min(L_i, L_k)

With more samples than slots each waits for the slot that is free first (`queued`).
"""

import heapq

import numpy as np

from orchestrator.planner.arrays import Array
from orchestrator.planner.latency import GenerateCost, kv_token_steps


def finish_times_s(
    prompt_tokens: Array, lengths: Array, cost: GenerateCost, *, max_batch: int, prefill_tokens: float | Array
) -> Array:
    """Seconds from the call's start at which each sample is done, for `lengths` in ascending order; of one shard, or of
    several, those with fewer samples beginning with such of no tokens. [..., S]

    `prefill_tokens` [...]: prompt tokens that are computed, shared ones once. More samples than slots are taken to
    advance together, in at least the tokens over the slots: an approximation, exact for equal lengths and whole rounds.
    """
    left = np.arange(lengths.shape[-1])[::-1]
    prompt_left = prompt_tokens.sum(axis=-1, keepdims=True) - np.cumsum(prompt_tokens, axis=-1)
    tokens = np.cumsum(lengths, axis=-1) + left * lengths
    held = np.cumsum(kv_token_steps(prompt_tokens, lengths), axis=-1)
    held += prompt_left * lengths + 0.5 * left * lengths**2
    begin_s = cost.call_s + cost.prefill_token_s * np.expand_dims(prefill_tokens, -1)
    steps = np.maximum(lengths, tokens / max_batch)  # no more than their lengths where each has a slot
    return begin_s + cost.step_s * steps + cost.sequence_s * tokens + cost.kv_token_s * held


def queued(
    prompt_tokens: Array, lengths: Array, cost: GenerateCost, *, max_batch: int, prefill_tokens: float
) -> tuple[Array, Array]:
    """Of samples that take a slot in this order, each the one that is free first: the step before which each is let in,
    and when it is done, in seconds from the call's start. [S] each

    Steps between two breakpoints (a sample comes or goes) have the same samples; a prompt is computed when its sample
    is let in, each token at `prefill_tokens` over all.
    """
    free = lengths[:max_batch].tolist()
    heapq.heapify(free)
    starts = np.zeros(len(lengths))
    for k in range(max_batch, len(lengths)):
        starts[k] = free[0]
        heapq.heapreplace(free, free[0] + lengths[k])
    ends = starts + lengths
    steps, place = np.unique(np.concatenate((starts, ends)), return_inverse=True)
    came, gone = place[: len(lengths)], place[len(lengths) :]
    each_s = cost.prefill_token_s * prefill_tokens / max(1.0, float(prompt_tokens.sum()))
    active, held, prefill_s = np.zeros((3, len(steps)))
    np.add.at(active, came, 1.0)
    np.add.at(active, gone, -1.0)
    np.add.at(held, came, prompt_tokens)
    np.add.at(held, gone, -(prompt_tokens + lengths))
    np.add.at(prefill_s, came, each_s * prompt_tokens)
    delta, active = np.diff(steps), np.cumsum(active)[:-1]
    held = np.cumsum(held)[:-1] + np.concatenate(([0.0], np.cumsum(active * delta)[:-1]))
    tokens = active * delta
    spent = cost.step_s * delta + cost.sequence_s * tokens + cost.kv_token_s * (held + 0.5 * tokens) * delta
    times = cost.call_s + np.concatenate(([0.0], np.cumsum(spent + prefill_s[:-1])))
    return starts, times[gone]
