"""Prompt prefixes that several samples share: each is computed once per replica.

The tokens that must be computed for a set of prompts are the nodes of their (uncompressed) trie: one per distinct
prefix. RLHFless searches one prefix length for all prompts and takes the count of distinct prefixes to grow
monotonically with savings; it does not (samples aX, aY: one distinct prefix of length 1, two of length 2). A radix trie
needs no such assumption.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Tokens that `a` and `b` begin with alike."""
    size = min(len(a), len(b))
    differ = a[:size] != b[:size]
    first = int(differ.argmax()) if size else 0
    return first if size and differ[first] else size


class _Node:
    __slots__ = ("children", "edge")

    def __init__(self, edge: Tokens) -> None:
        self.edge = edge
        self.children: dict[int, _Node] = {}


class RadixTrie:
    """A set of token sequences; edges hold runs of tokens."""

    def __init__(self) -> None:
        self._root = _Node(np.zeros(0, np.int64))
        self.tokens = 0
        """Distinct prefixes in the set, the empty one not counted: the tokens that a replica computes."""

    def insert(self, sequence: Sequence[int] | Tokens) -> int:
        """Adds a sequence; how many of its tokens no earlier sequence had as a prefix."""
        rest = np.asarray(sequence, dtype=np.int64)
        node = self._root
        while len(rest):
            child = node.children.get(int(rest[0]))
            if child is None:
                node.children[int(rest[0])] = _Node(rest)
                self.tokens += len(rest)
                return len(rest)
            shared = common_prefix(child.edge, rest)
            if shared < len(child.edge):
                upper = _Node(child.edge[:shared])
                child.edge = child.edge[shared:]
                upper.children[int(child.edge[0])] = child
                node.children[int(upper.edge[0])] = upper
                child = upper
            node, rest = child, rest[shared:]
        return 0

    def match(self, sequence: Sequence[int] | Tokens) -> int:
        """How many tokens at the head of `sequence` are in the set already."""
        rest = np.asarray(sequence, dtype=np.int64)
        node, found = self._root, 0
        while len(rest):
            child = node.children.get(int(rest[0]))
            if child is None:
                return found
            shared = common_prefix(child.edge, rest)
            found += shared
            if shared < len(child.edge):
                return found
            node, rest = child, rest[shared:]
        return found


def unique_tokens(sequences: Iterable[Sequence[int] | Tokens]) -> int:
    """Tokens to compute for these sequences when every distinct prefix is computed once."""
    trie = RadixTrie()
    for sequence in sequences:
        trie.insert(sequence)
    return trie.tokens


def shared_head(sequences: Sequence[Sequence[int]]) -> int:
    """Tokens that all sequences begin with alike (a system prompt)."""
    if not sequences:
        return 0
    arrays = [np.asarray(s, dtype=np.int64) for s in (min(map(tuple, sequences)), max(map(tuple, sequences)))]
    return common_prefix(arrays[0], arrays[1])  # the lexicographic extremes bound all others
