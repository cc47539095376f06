"""Keys and values of a cohort, and attention over them.

A cohort is a set of rows (samples) that started together: row r answers prompt `group[r]`, and all rows have the same
number of own tokens, so their own keys need neither padding nor mask. A prompt's keys are stored once for all of its
rows:

    prefix  [layers, 2, P, kv heads, T, D]      one entry per prompt, padded to the longest
    suffix  [layers, 2, rows, kv heads, C, D]   each row's own tokens, the first `length` of `capacity`

    scores of a row = softmax over [its prompt's keys | its own keys]

Queries of the rows of one prompt, and of the query heads of one kv head, are folded into one matrix [lanes * G, D]
per prompt and kv head, so that the prompt's keys are read once for all of them.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_BLOCK = 16


def capacity(tokens: int) -> int:
    """Own tokens that there is room for when `tokens` are needed: whole blocks, an eighth more where there are many.

    Scores are computed over the whole room and those of the empty end set to -inf: a batch of small products runs
    several times faster on a CPU when its matrices lie one behind the other without gaps. The room depends on nothing
    but the length (deterministic mode).
    """
    room = _BLOCK
    while room < tokens:
        room += max(_BLOCK, room // (8 * _BLOCK) * _BLOCK)
    return room


def placed(
    whole: Sequence[Tensor], group: npt.NDArray[np.int64], after: int, device: torch.device
) -> tuple[Tensor, npt.NDArray[np.int64], Tensor]:
    """Prefix, its lengths and suffix of rows whose keys and values are known, `whole` [kv heads, layers, 2, tokens, D]
    of each (see `Cache.of`): the last `after` tokens of each are its own, the others the prefix of its group, which all
    of its rows have alike."""
    heads, layers, _, _, width = whole[0].shape
    first = np.searchsorted(group, np.arange(group[-1] + 1))
    lengths = np.array([whole[row].shape[3] - after for row in first])
    shape = (layers, 2, len(first), heads, int(lengths.max()), width)
    prefix = torch.zeros(shape, dtype=whole[0].dtype, device=device)
    for number, (row, length) in enumerate(zip(first, lengths, strict=True)):
        prefix[:, :, number, :, :length] = whole[row][..., :length, :].permute(1, 2, 0, 3, 4)
    own = torch.empty((layers, 2, len(whole), heads, after, width), dtype=prefix.dtype, device=device)
    for row, cache in enumerate(whole):
        own[:, :, row] = cache[..., cache.shape[3] - after :, :].permute(1, 2, 0, 3, 4)
    return prefix, lengths, own


class Cache:
    """`lanes` is the width of the fold: no prompt may have more rows. `own` [layers, 2, rows, kv heads, C, D]: keys and
    values of tokens that the rows have already."""

    def __init__(
        self, prefix: Tensor, lengths: npt.NDArray[np.int64], group: npt.NDArray[np.int64], lanes: int,
        own: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.length = 0 if own is None else own.shape[4]
        self._prefix = prefix
        self._lengths = torch.from_numpy(lengths).to(prefix.device)
        self._least, self._most = int(lengths.min()), int(lengths.max())
        self._lanes = lanes
        self._rows = len(group)
        # Row r sits at lane seat[r] % lanes of prompt seat[r] // lanes.
        order = np.argsort(group, kind="stable")
        first = np.searchsorted(group[order], group[order])
        seat = np.empty(len(group), np.int64)
        seat[order] = group[order] * lanes + np.arange(len(group)) - first
        self._seats = seat
        self._place()
        layers, _, _, heads, _, width = prefix.shape
        shape = (layers, 2, self._rows, heads, capacity(max(1, self.length)), width)
        self._suffix = torch.zeros(shape, dtype=prefix.dtype, device=prefix.device)
        if own is not None:
            self._suffix[:, :, :, :, : self.length] = own

    def grow(self) -> None:
        """Makes room for one more token of every row."""
        used, old = self.length, self._suffix
        if used < old.shape[4]:
            return
        shape = (*old.shape[:2], self._rows, old.shape[3], capacity(used + 1), old.shape[5])
        self._suffix = torch.zeros(shape, dtype=old.dtype, device=old.device)
        self._suffix[:, :, :, :, :used] = old[:, :, : self._rows]

    @torch.inference_mode()
    def keep(self, stay: npt.NDArray[np.int64]) -> None:
        """Row i becomes what row stay[i] was: the rows of `cohort.survivors`, few of which move."""
        moved = np.flatnonzero(stay != np.arange(len(stay)))
        if len(moved):
            to, source = torch.from_numpy(moved), torch.from_numpy(stay[moved])
            own = self._suffix[..., : self.length, :]
            own[:, :, to] = own[:, :, source]
        self._rows = len(stay)
        self._seats = self._seats[stay]
        self._drop_prompts()
        self._place()

    def _drop_prompts(self) -> None:
        """Forgets prompts without rows when they are half of all: every step reads each prompt that is there."""
        left = np.unique(self._seats // self._lanes)
        if not 0 < 2 * len(left) <= self._prefix.shape[2]:
            return
        index = torch.from_numpy(left).to(self._prefix.device)
        self._lengths = self._lengths[index]
        self._least, self._most = int(self._lengths.min()), int(self._lengths.max())
        self._prefix = self._prefix[:, :, index, :, : self._most].contiguous()
        self._seats = np.searchsorted(left, self._seats // self._lanes) * self._lanes + self._seats % self._lanes

    def of(self, row: int) -> Tensor:
        """A copy of all that a row sees: its prompt's, then its own. [kv heads, layers, 2, tokens, D]"""
        prompt = int(self._seats[row]) // self._lanes
        shared = self._prefix[:, :, prompt, :, : int(self._lengths[prompt])]
        own = self._suffix[:, :, row, :, : self.length]
        layers, _, heads, split, width = shared.shape
        whole = shared.new_empty(heads, layers, 2, split + self.length, width)
        whole[..., :split, :] = shared.permute(2, 0, 1, 3, 4)
        whole[..., split:, :] = own.permute(2, 0, 1, 3, 4)
        return whole

    def attend(self, layer: int, window: int | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Adds k, v [rows, kv heads, D] as token `length` of each row; attention of q [rows, heads, D], same shape.

        Scores are not scaled here. A window of w keeps the keys at distance < w.
        """
        now, rows = self.length, self._rows
        heads, width = k.shape[1], k.shape[2]
        keys, values = self._suffix[layer, 0, :rows], self._suffix[layer, 1, :rows]
        keys[:, :, now] = k
        values[:, :, now] = v
        low = 0 if window is None else max(0, now + 1 - window)
        folded = q.reshape(rows * heads, -1, width)
        own = torch.bmm(folded, keys[:, :, low:].flatten(0, 1).transpose(1, 2))
        own[:, :, now + 1 - low :] = -torch.inf
        own_values = values[:, :, low:].flatten(0, 1)
        if window is not None and now + 1 >= window:  # the whole prompt is out of sight
            return torch.bmm(own.softmax(-1), own_values).view_as(q)
        from_low = 0 if window is None else max(0, self._least + now + 1 - window)
        prompt_keys = self._prefix[layer, 0, :, :, from_low : self._most]
        prompt_values = self._prefix[layer, 1, :, :, from_low : self._most]
        shared = torch.matmul(self._to_seats(folded, heads), prompt_keys.transpose(-1, -2))
        hidden = self._hidden(from_low, now, window)
        if hidden is not None:
            shared = shared.masked_fill_(hidden, -torch.inf)
        split = shared.shape[-1]
        weight = torch.cat((self._to_rows(shared), own), -1).softmax(-1)
        from_prompt = torch.matmul(self._to_seats(weight[..., :split], heads), prompt_values)
        return torch.bmm(weight[..., split:], own_values).add_(self._to_rows(from_prompt)).view_as(q)

    def _hidden(self, low: int, now: int, window: int | None) -> Tensor | None:
        """Prompt positions low.. that a row does not see: padding, and those out of its window. [P, 1, 1, T]"""
        if self._least == self._most:
            return None
        at = torch.arange(low, self._most, device=self._lengths.device)
        lengths = self._lengths[:, None]
        hidden = at >= lengths
        if window is not None:
            hidden |= at <= lengths + (now - window)
        return hidden[:, None, None]

    def _place(self) -> None:
        seats = self._prefix.shape[2] * self._lanes
        self._full = np.array_equal(self._seats, np.arange(seats))
        self._seat = torch.from_numpy(self._seats).to(self._prefix.device)

    def _to_seats(self, rows: Tensor, heads: int) -> Tensor:
        """[rows * kv heads, G, X] -> [P, kv heads, lanes * G, X], zeros in empty seats."""
        prompts, lanes = self._prefix.shape[2], self._lanes
        group, width = rows.shape[1:]
        seats = rows.reshape(self._rows, heads, group, width)
        if not self._full:
            seats = rows.new_zeros(prompts * lanes, heads, group, width).index_copy_(0, self._seat, seats)
        return seats.view(prompts, lanes, heads, group, width).transpose(1, 2).reshape(prompts, heads, -1, width)

    def _to_rows(self, seats: Tensor) -> Tensor:
        """The inverse: [P, kv heads, lanes * G, X] -> [rows * kv heads, G, X]."""
        prompts, heads, folded, width = seats.shape
        group = folded // self._lanes
        rows = seats.view(prompts, heads, self._lanes, group, width).transpose(1, 2).reshape(-1, heads, group, width)
        if not self._full:
            rows = rows.index_select(0, self._seat)
        return rows.reshape(-1, group, width)
