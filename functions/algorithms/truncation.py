"""Top-k, top-p and min-p: the part of a distribution that is sampled from.

    z = logits / temperature;  K = the tokens that min-p, top-k, then top-p leave
    ln p_truncated(y) = ln p(y) - ln sum_{v in K} p(v)
The engine samples from p_truncated and reports its log-probabilities; the trainer improves p. What makes the two
comparable is the mass of K (functions/algorithms/logprobs.py: kept_mass).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Truncation(NamedTuple):
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0
    """Tokens less probable than this share of the most probable one are left out."""


WHOLE = Truncation()


def truncated(logits: Tensor, truncation: Truncation) -> Tensor:
    """`logits` [S, V] with -inf where min-p, top-k or top-p leave a token out.

    Order as in vLLM: min-p (arXiv:2407.01082), top-k, then top-p (Holtzman et al., arXiv:1904.09751: the smallest set
    of most probable tokens whose mass reaches p). Ties at the k-th logit are all kept.
    """
    top_p, top_k, min_p = truncation
    if min_p > 0.0:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(min_p), -torch.inf)
    if 0 < top_k < logits.shape[-1]:
        least = logits.topk(top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        left_out = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(left_out, -torch.inf)
    return logits
