"""How finished samples are laid out for one forward pass: a prompt's tokens once, then its responses.

    shared    [ prompt A | response A0 | response A1 | ... | prompt B | response B0 | ... ]      one row, no padding
    padded    [ prompt A   response A0 ........ ]
              [ prompt A   response A1          ]                              sorted by length, padded to the right

In both, the state before a response token predicts it: the first token is predicted by the prompt's last state, and
the last token of a response is never an input. Splitting a batch into packs changes no value, only when it is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from functions.base.samples import SampleBatch

BUCKET_SHARE = 0.7
"""Responses of a prompt attend together when the shortest has this share of the longest's tokens; the rest is padding
inside the attention (measured: fewer, wider calls win down to about this share)."""
BUCKET_TOKENS = 24
"""Responses below this length are never divided: a call costs more than their padding."""


@dataclass(frozen=True)
class Bucket:
    """Responses of one prompt whose attention is one call, as rows [count, width]."""

    start: int
    """Their first token in the pack; they follow each other."""
    count: int
    width: int
    gather: Tensor | None
    """int64 [count * width]: the pack's token of each place of the rows; None where all have the full width."""
    real: Tensor | None
    """int64 [tokens]: the places that hold a token."""
    tokens: int


@dataclass(frozen=True)
class Prefix:
    """A prompt's copy in a pack and the responses that follow it."""

    start: int
    length: int
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True)
class Pack:
    """What one forward pass computes: the states that predict the N response tokens of some samples."""

    rows: tuple[int, ...]
    """The samples of the batch, in the pack's order."""
    tokens: Tensor
    """int64 [1, T] shared, [B, T] padded."""
    positions: Tensor
    """int64, as `tokens`: the position of each token in its own sequence."""
    prefixes: tuple[Prefix, ...] | None
    """The layout that attention needs; None for a padded pack (causal attention over rows is right as it is)."""
    predicts: Tensor
    """int64 [N]: which state, of the flattened rows, predicts each response token."""
    targets: Tensor
    """int64 [N]: the response tokens."""
    flat: Tensor
    """int64 [N]: their places among the response tokens of the whole batch."""
    segment: Tensor
    """int64 [N]: their sample (row of the batch)."""
    experts: Tensor | None = None
    """int16 [B, T, layers, k]: those that the rollout's routers chose for each token, -1 where it does not say, as of
    prompts but for their last token; None: the model's own routers choose (router_replay.py)."""

    def to(self, device: torch.device) -> Pack:
        if device.type == "cpu":
            return self
        moved = {
            name: getattr(self, name).to(device)
            for name in ("tokens", "positions", "predicts", "targets", "flat", "segment", "experts")
            if getattr(self, name) is not None
        }
        prefixes = None if self.prefixes is None else tuple(_prefix_to(p, device) for p in self.prefixes)
        return Pack(rows=self.rows, prefixes=prefixes, **moved)


def make_packs(
    batch: SampleBatch, rows: Iterable[int], *, budget_tokens: int, shared: bool, replay: bool = False
) -> list[Pack]:
    """Packs of the samples `rows` of `batch`, each of at most `budget_tokens` computed tokens; `replay`: with the
    experts that came with the samples.

    A single sample above the budget has a pack of its own. Samples without response tokens are in no pack. The result
    depends on the samples alone, not on the order of `rows`. Raises ValueError for a sample with an empty prompt.
    """
    prompts, responses = batch.prompts.rows(), batch.responses.rows()
    chosen = sorted(row for row in set(rows) if len(responses[row]))
    for row in chosen:
        if not len(prompts[batch.prompt[row]]):
            raise ValueError(f"sample (group {batch.group[row]}, index {batch.index[row]}): its prompt has no token")
    offsets = batch.responses.offsets
    plan = _plan_shared if shared else _plan_padded
    build = _shared_pack if shared else _padded_pack
    packs = [
        build(part, batch, prompts, responses, offsets)
        for part in plan(chosen, batch, prompts, responses, budget_tokens)
    ]
    if batch.experts is None or not replay:
        return packs
    rows = np.flatnonzero(batch.responses.lengths)  # a prompt's last token predicts the first of all its samples
    _, first, which = np.unique(batch.prompt[rows], return_index=True, return_inverse=True)
    source = np.arange(len(batch.experts))
    source[offsets[rows]] = offsets[rows[first[which]]]  # of which the first one says its experts, in whatever packs
    return [_replaying(pack, batch.experts[source[pack.flat.numpy()]]) for pack in packs]


def _replaying(pack: Pack, own: npt.NDArray[Any]) -> Pack:
    """With the experts `own` [N, layers, k]."""
    whole = np.full((pack.tokens.numel(), *own.shape[1:]), -1, np.int16)
    whole[pack.predicts.numpy()] = np.where(own == np.iinfo(own.dtype).max, -1, own.astype(np.int16))
    return replace(pack, experts=torch.from_numpy(whole).view(*pack.tokens.shape, *own.shape[1:]))


_Rows = Sequence[npt.NDArray[Any]]
_Offsets = npt.NDArray[np.int64]


def _plan_shared(
    chosen: list[int], batch: SampleBatch, prompts: _Rows, responses: _Rows, budget: int
) -> Iterator[list[int]]:
    """Fills packs prompt by prompt; a prompt whose samples do not fit goes on in the next pack, with another copy."""
    by_prompt: dict[int, list[int]] = {}
    for row in chosen:
        by_prompt.setdefault(int(batch.prompt[row]), []).append(row)
    part: list[int] = []
    used = 0
    for prompt, members in by_prompt.items():
        head = len(prompts[prompt])
        whole = head + sum(len(responses[row]) - 1 for row in members)
        if part and used + whole > budget:
            yield part
            part, used = [], 0
        used += head
        for row in sorted(members, key=lambda r: (-len(responses[r]), r)):
            cost = len(responses[row]) - 1
            if part and used + cost > budget and used > head:
                yield part
                part, used = [], head
            part.append(row)
            used += cost
    if part:
        yield part


def _plan_padded(
    chosen: list[int], batch: SampleBatch, prompts: _Rows, responses: _Rows, budget: int
) -> Iterator[list[int]]:
    length = {row: len(prompts[batch.prompt[row]]) + len(responses[row]) - 1 for row in chosen}
    part: list[int] = []
    for row in sorted(chosen, key=lambda r: (-length[r], r)):
        if part and (len(part) + 1) * length[part[0]] > budget:
            yield part
            part = []
        part.append(row)
    if part:
        yield part


def _shared_pack(part: list[int], batch: SampleBatch, prompts: _Rows, responses: _Rows, offsets: _Offsets) -> Pack:
    by_prompt: dict[int, list[int]] = {}
    for row in part:
        by_prompt.setdefault(int(batch.prompt[row]), []).append(row)
    tokens, positions, prefixes, predicts, rows = [], [], [], [], []
    at = 0
    for prompt, members in by_prompt.items():
        start, head = at, prompts[prompt]
        tokens.append(head)
        positions.append(np.arange(len(head)))
        at += len(head)
        lengths = []
        for row in sorted(members, key=lambda r: (-len(responses[r]), r)):
            inputs = responses[row][:-1]
            tokens.append(inputs)
            positions.append(np.arange(len(head), len(head) + len(inputs)))
            predicts.append(np.concatenate(([start + len(head) - 1], np.arange(at, at + len(inputs)))))
            lengths.append(len(inputs))
            rows.append(row)
            at += len(inputs)
        prefixes.append(Prefix(start, len(head), tuple(_buckets(lengths, start + len(head)))))
    return _pack(
        rows,
        np.concatenate(tokens)[None],
        np.concatenate(positions)[None],
        tuple(prefixes),
        predicts,
        responses,
        offsets,
    )


def _buckets(lengths: list[int], start: int) -> Iterator[Bucket]:
    """`lengths` descend; the zeros at the end (responses of one token) have no input."""
    at = 0
    while at < len(lengths) and lengths[at]:
        width, end = lengths[at], at + 1
        while end < len(lengths) and lengths[end] and (lengths[end] >= BUCKET_SHARE * width or width < BUCKET_TOKENS):
            end += 1
        own = np.array(lengths[at:end])
        count, total = end - at, int(own.sum())
        gather = real = None
        if total < count * width:
            begin = np.cumsum(own) - own
            place = np.arange(width)[None, :]
            gather = torch.from_numpy(start + (begin[:, None] + np.minimum(place, own[:, None] - 1)).reshape(-1))
            real = torch.from_numpy(np.flatnonzero(place < own[:, None]))
        yield Bucket(start, count, width, gather, real, total)
        start += total
        at = end


def _padded_pack(part: list[int], batch: SampleBatch, prompts: _Rows, responses: _Rows, offsets: _Offsets) -> Pack:
    sequences = [np.concatenate((prompts[batch.prompt[row]], responses[row][:-1])) for row in part]
    width = max(len(s) for s in sequences)
    tokens = np.zeros((len(part), width), np.int64)
    predicts = []
    for i, (row, sequence) in enumerate(zip(part, sequences, strict=True)):
        tokens[i, : len(sequence)] = sequence
        first = i * width + len(sequence) - len(responses[row])
        predicts.append(np.arange(first, first + len(responses[row])))
    positions = np.broadcast_to(np.arange(width), tokens.shape).copy()
    return _pack(part, tokens, positions, None, predicts, responses, offsets)


def _pack(
    rows: list[int],
    tokens: npt.NDArray[Any],
    positions: npt.NDArray[Any],
    prefixes: tuple[Prefix, ...] | None,
    predicts: _Rows,
    responses: _Rows,
    offsets: _Offsets,
) -> Pack:
    return Pack(
        rows=tuple(rows),
        tokens=torch.from_numpy(tokens.astype(np.int64)),
        positions=torch.from_numpy(positions.astype(np.int64)),
        prefixes=prefixes,
        predicts=torch.from_numpy(np.concatenate(predicts).astype(np.int64)),
        targets=torch.from_numpy(np.concatenate([responses[row] for row in rows]).astype(np.int64)),
        flat=torch.from_numpy(np.concatenate([np.arange(offsets[row], offsets[row + 1]) for row in rows])),
        segment=torch.from_numpy(np.repeat(np.array(rows, np.int64), [len(responses[row]) for row in rows])),
    )


def _prefix_to(prefix: Prefix, device: torch.device) -> Prefix:
    def move(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device)

    buckets = tuple(Bucket(b.start, b.count, b.width, move(b.gather), move(b.real), b.tokens) for b in prefix.buckets)
    return Prefix(prefix.start, prefix.length, buckets)
