"""When each sample of a shard finishes on its replica, in closed form.

With all samples in a slot, sample k (lengths ascending L_1 <= ... <= L_S) finishes after L_k steps, in which sample i
took part in min(L_i, L_k) of them:

    t_k = call + prefill + a L_k + b sum_i min(L_i, L_k) + c sum_i (P_i m_ik + m_ik^2 / 2),   m_ik = min(L_i, L_k)

With more samples than slots the steps are at least the tokens over the slots: an approximation, exact for equal
lengths and whole rounds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from orchestrator.planner.latency import GenerateCost, kv_token_steps

Array = npt.NDArray[np.float64]


def finish_times_s(
    prompt_tokens: Array, lengths: Array, cost: GenerateCost, *, max_batch: int, prefill_tokens: float
) -> Array:
    """Seconds from the call's start at which each sample is done, for `lengths` in ascending order. [S]

    `prefill_tokens`: prompt tokens that are computed, shared ones once.
    """
    count = len(lengths)
    left = count - 1 - np.arange(count)
    prompt_left = prompt_tokens.sum() - np.cumsum(prompt_tokens)
    tokens = np.cumsum(lengths) + left * lengths
    held = np.cumsum(kv_token_steps(prompt_tokens, lengths)) + prompt_left * lengths + 0.5 * left * lengths**2
    steps = np.maximum(lengths, tokens / max_batch) if count > max_batch else lengths
    begin_s = cost.call_s + cost.prefill_token_s * prefill_tokens
    times: Array = begin_s + cost.step_s * steps + cost.sequence_s * tokens + cost.kv_token_s * held
    return times
