"""What sampling does to logits because of the tokens before: repetition penalty and bad words.

    z_v of a token that stands in the prompt or in the response so far:  z / penalty where z > 0, else z * penalty
    the last token of a banned sequence, where the response ends in the others: -inf
Keskar et al., arXiv:1909.05858, section 4.1, as vLLM and transformers have it; before the temperature, which changes
nothing about either. Engines and the trainer call the same function, so that both mean the same distribution.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

History = Callable[[int], tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]]
"""Of row i of the logits: prompt, and response before the token that the row is the distribution of."""


class Penalties(NamedTuple):
    repetition: float = 1.0
    banned: tuple[tuple[int, ...], ...] = ()


NO_PENALTIES = Penalties()


def penalized(logits: Tensor, penalties: Penalties, history: History) -> Tensor:
    """A copy of `logits` [S, V] with the penalties applied; `logits` itself where there are none."""
    if penalties == NO_PENALTIES:
        return logits
    result = logits.clone()
    for row in range(len(result)):
        prompt, response = history(row)
        if penalties.repetition != 1.0:
            seen = torch.from_numpy(np.unique(np.concatenate((prompt, response)))).long().to(logits.device)
            values = result[row, seen]
            by = torch.full_like(values, penalties.repetition)
            result[row, seen] = torch.where(values > 0, values / by, values * by)
        for sequence in penalties.banned:
            if _ends_in(response, sequence[:-1]):
                result[row, sequence[-1]] = -torch.inf
    return result


def _ends_in(tokens: npt.NDArray[np.int32], tail: Sequence[int]) -> bool:
    return not tail or (len(tokens) >= len(tail) and tokens[-len(tail) :].tolist() == list(tail))
