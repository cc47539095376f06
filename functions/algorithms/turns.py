"""Turns of episodes: runs of tokens that the policy chose, between those that an environment gave."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TurnRuns:
    """The trained turns of a batch, T of them, in the order of their tokens."""

    sequence: Tensor
    """int64 [T], the sequence that each belongs to."""
    of: Tensor
    """int64 [N], the turn of each token; -1 under the mask."""

    def sums(self, values: Tensor) -> Tensor:
        """float64 [T]: of `values` [N] over each turn."""
        inside = self.of >= 0
        total = torch.zeros(len(self.sequence), dtype=torch.float64, device=values.device)
        return total.index_add_(0, self.of[inside], values[inside].double())

    def firsts(self, values: Tensor) -> Tensor:
        """[T]: of `values` [N], that at each turn's first token."""
        before = torch.cat((self.of.new_full((1,), -2), self.of[:-1]))
        return values[(self.of >= 0) & (self.of != before)]

    def returns(self, rewards: Tensor, gamma: float) -> Tensor:
        """[T]: r_t + gamma R_{t+1} over the turns of each sequence."""
        result = rewards.clone()
        for turn in reversed(range(len(rewards) - 1)):
            if self.sequence[turn] == self.sequence[turn + 1]:
                result[turn] += gamma * result[turn + 1]
        return result

    def spread(self, values: Tensor) -> Tensor:
        """[N]: each turn's value [T] on its tokens, 0 under the mask."""
        return torch.where(self.of >= 0, torch.cat((values, values.new_zeros(1)))[self.of], values.new_zeros(()))


def turns_of(segment: Tensor, mask: Tensor) -> TurnRuns:
    """A turn ends where the mask is 0, and where another sequence begins. segment, mask [N]."""
    trained = mask == 1
    new = torch.ones_like(trained)
    new[1:] = ~trained[:-1] | (segment[1:] != segment[:-1])
    begins = trained & new
    return TurnRuns(sequence=segment[begins], of=torch.where(trained, begins.cumsum(0) - 1, -1))
