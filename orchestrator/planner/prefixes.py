"""Prompt prefixes that several samples share: each is computed once per replica.

The tokens that must be computed for a set of prompts are the nodes of their (uncompressed) trie: one per distinct
prefix. RLHFless searches one prefix length for all prompts and takes the count of distinct prefixes to grow
monotonically with savings; it does not (samples aX, aY: one distinct prefix of length 1, two of length 2). Counting
them needs no such assumption.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from orchestrator.planner.arrays import Numbers

WORTH = 16
"""Tokens of a head that are worth keeping prompts together for."""


class Prefixes:
    """The prompts of a step in lexicographic order, with the tokens that neighbours begin with alike.

    The trie of any subset has sum(lengths) - sum(common prefixes of neighbours in the subset) tokens, and two prompts
    further apart begin alike for as long as the least of what lies between them: a range minimum (sparse table), so
    that a shard is counted in O(its prompts) instead of O(its tokens).
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        rows = [tuple(sequence) for sequence in sequences]
        order = sorted(range(len(rows)), key=rows.__getitem__)
        self.rank = np.empty(len(order), np.int64)
        """[P]: place of each prompt in the order."""
        self.rank[order] = np.arange(len(order))
        self.lengths = np.array([len(row) for row in rows], dtype=np.int64)
        self._whole = self.lengths[order]
        common = [_common(rows[a], rows[b]) for a, b in pairwise(order)]
        self.common = np.array([0, *common][: len(order)], dtype=np.int64)
        """`common` [P]: tokens that each in the order begins with like the one before it."""
        self._least = [self.common]
        width = 1
        while 2 * width <= len(order):
            last = self._least[-1]
            self._least.append(np.minimum(last[:-width], last[width:]))
            width *= 2

    @property
    def head(self) -> int:
        """Tokens that all begin with alike."""
        return int(self.common[1:].min()) if len(self.common) > 1 else int(self.lengths.sum())

    def tokens(self, rows: Numbers) -> int:
        """Tokens to compute for these prompts (each named once) where every distinct prefix is computed once."""
        return int(self.tokens_of(rows, np.zeros(len(rows), np.int64), 1)[0])

    def tokens_of(self, rows: Numbers, shard: Numbers, shards: int) -> Numbers:
        """The same of each shard; a prompt may be named more than once. [shards]"""
        places = self.rank[rows]
        order = np.lexsort((places, shard))
        places, shard, own = places[order], shard[order], self.lengths[rows[order]]
        alike = np.flatnonzero(shard[1:] == shard[:-1])
        own[alike + 1] -= self._between(places[alike], places[alike + 1])
        return np.bincount(shard, own, shards).astype(np.int64)

    def _between(self, first: Numbers, last: Numbers) -> Numbers:
        """Common prefix of the prompts at places first <= last: the least of common[first + 1 .. last]."""
        level = np.frexp(last - first)[1] - 1  # floor of the logarithm; of one prompt named twice -1
        found = self._whole[first]
        for k in np.unique(level[level >= 0]).tolist():
            at = level == k
            table = self._least[k]
            found[at] = np.minimum(table[first[at] + 1], table[last[at] - (1 << k) + 1])
        return found

    def families(self) -> Numbers:
        """[P]: prompts with one number share a head that is longer than what all prompts share by WORTH tokens."""
        begins = self.common <= self.head + WORTH
        begins[:1] = True
        number = np.cumsum(begins) - 1
        return number[self.rank]


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Tokens that `a` and `b` begin with alike; by bisection: comparing slices is cheaper than making arrays."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low
