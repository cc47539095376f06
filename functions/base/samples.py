"""Samples and what the stages say about them: columnar, ragged, encoded as safetensors bytes. No torch here.

A worked example: two prompts, two samples each, the second sample of the first prompt still unfinished.

    prompts     [[5, 6, 7], [8, 9]]          ragged, one row per *unique* prompt
    prompt      [0, 0, 1, 1]                 which prompt row each sample answers
    group,index [0, 0, 1, 1], [0, 1, 0, 1]   a sample's identity within its step
    responses   [[11, 2], [12], [13, 14, 2], [2]]
    logprobs    aligned with the response tokens: ln p of each under the distribution it was sampled from
    finish      [STOP, UNFINISHED, STOP, STOP]
    version     [3, 3, 3, 3]                 the policy version that made each sample

The same type is the input of `generate` (responses empty, or as far as a cut let them come) and its output, so a
migrated sample is simply a sample that is generated again from where it was.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as safetensors_load
from safetensors.numpy import save as safetensors_save

from functions.base.wire import WireError

Int = npt.NDArray[np.int32]
Float = npt.NDArray[np.float32]
OF_SAMPLE, OF_TOKEN = ("prompt", "group", "index", "finish", "version"), ("logprobs", "mask")
"""Columns of SampleBatch: a value a sample, and a value a response token; beside them `experts`."""


class Finish(enum.IntEnum):
    """Why a sample ended (int32 in the `finish` column)."""

    UNFINISHED = 0
    STOP = 1
    LENGTH = 2
    TURNS = 3
    """Its environment would have answered once more: no turn was left."""
    ENVIRONMENT = 4
    """Its environment said that the episode is over, or failed."""


def _offsets(lengths: Int) -> npt.NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths: `flat` [total] and `lengths` [rows]."""

    flat: npt.NDArray[Any]
    lengths: Int

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[float] | npt.NDArray[Any]], dtype: npt.DTypeLike) -> Ragged:
        arrays = [np.asarray(row, dtype=dtype) for row in rows]
        flat = np.concatenate(arrays) if arrays else np.zeros(0, dtype=dtype)
        return cls(flat.astype(dtype, copy=False), np.array([len(a) for a in arrays], dtype=np.int32))

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        return _offsets(self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> npt.NDArray[Any]:
        offsets = self.offsets
        return self.flat[offsets[row] : offsets[row + 1]]

    def rows(self) -> list[npt.NDArray[Any]]:
        offsets = self.offsets
        return [self.flat[offsets[i] : offsets[i + 1]] for i in range(len(self))]

    def places(self, index: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where in `flat` the values of the rows at `index` are, row after row."""
        lengths = self.lengths[index].astype(np.int64)
        before = np.cumsum(lengths) - lengths
        places: npt.NDArray[np.int64] = np.repeat(self.offsets[index] - before, lengths) + np.arange(int(lengths.sum()))
        return places

    def select(self, index: npt.NDArray[np.int64]) -> Ragged:
        return Ragged(self.flat[self.places(index)], self.lengths[index])


@dataclass(frozen=True)
class SampleBatch:
    """S samples of P unique prompts, columnar and ragged. See the example at the head of this module.

    `mask` [response tokens] is 1 where a token was chosen by the policy and trains it, 0 where it was given: what an
    environment answered, between two turns (`turns`). All turns of a sample are of one version: generate refuses
    others.

    `experts` [response tokens, layers, k], of routing replay alone: what each layer's router chose for the token
    before, whose state predicts this one; the dtype's greatest number (`unrouted`) where nobody says.
    """

    prompts: Ragged  # int32, P rows
    prompt: Int  # [S]
    group: Int  # [S]
    index: Int  # [S]
    responses: Ragged  # int32, S rows
    logprobs: Float  # [response tokens]
    mask: Float  # [response tokens]
    finish: Int  # [S]
    version: Int  # [S]
    experts: npt.NDArray[Any] | None = None

    def __post_init__(self) -> None:
        samples, tokens = len(self.responses), int(self.responses.lengths.sum())
        for name in OF_SAMPLE:
            if len(getattr(self, name)) != samples:
                raise WireError(f"SampleBatch.{name} has {len(getattr(self, name))} rows, responses have {samples}")
        for name in self._of_token:
            if len(getattr(self, name)) != tokens:
                raise WireError(f"SampleBatch.{name} has {len(getattr(self, name))} values for {tokens} tokens")
        if len(self.responses.flat) != tokens or len(self.prompts.flat) != int(self.prompts.lengths.sum()):
            raise WireError("SampleBatch: flat tokens and lengths do not add up")
        if samples and not (self.prompt.min() >= 0 and self.prompt.max() < len(self.prompts)):
            raise WireError("SampleBatch.prompt points outside the prompts")

    def __len__(self) -> int:
        return len(self.responses)

    @property
    def _of_token(self) -> tuple[str, ...]:
        return OF_TOKEN if self.experts is None else (*OF_TOKEN, "experts")

    @property
    def keys(self) -> list[tuple[int, int]]:
        """(group, index) of each sample."""
        return _keys(self.group, self.index)

    @property
    def token_counts(self) -> npt.NDArray[np.int32]:
        """Tokens of each sample, its prompt included. int32 [S]"""
        return self.prompts.lengths[self.prompt] + self.responses.lengths

    @property
    def about(self) -> dict[str, list[int]]:
        """What an event tells of its samples: one number for each."""
        return {
            "group": self.group.tolist(),
            "index": self.index.tolist(),
            "prompt_length": self.prompts.lengths[self.prompt].tolist(),
            "length": self.responses.lengths.tolist(),
            "finish": self.finish.tolist(),
        }

    @classmethod
    def of_prompts(
        cls, prompts: Sequence[Sequence[int]], *, samples_per_prompt: int, version: int, first_group: int = 0
    ) -> SampleBatch:
        """Samples with nothing generated yet: group g = first_group + row of `prompts`, index 0..n-1."""
        count = len(prompts) * samples_per_prompt
        row = np.repeat(np.arange(len(prompts), dtype=np.int32), samples_per_prompt)
        return cls(
            prompts=Ragged.from_rows(prompts, np.int32),
            prompt=row,
            group=row + np.int32(first_group),
            index=np.tile(np.arange(samples_per_prompt, dtype=np.int32), len(prompts)),
            responses=Ragged(np.zeros(0, np.int32), np.zeros(count, np.int32)),
            logprobs=np.zeros(0, np.float32),
            mask=np.zeros(0, np.float32),
            finish=np.full(count, Finish.UNFINISHED, np.int32),
            version=np.full(count, version, np.int32),
        )

    def select(self, index: Sequence[int] | npt.NDArray[Any]) -> SampleBatch:
        """The samples at `index`, in that order; prompts that none of them answers are left out."""
        at = np.asarray(index, dtype=np.int64)
        used, prompt = np.unique(self.prompt[at], return_inverse=True)
        places = self.responses.places(at)
        columns = {name: getattr(self, name)[at] for name in OF_SAMPLE}
        columns |= {name: getattr(self, name)[places] for name in self._of_token}
        columns["prompt"] = prompt.astype(np.int32).reshape(-1)
        responses = Ragged(self.responses.flat[places], self.responses.lengths[at])
        return SampleBatch(prompts=self.prompts.select(used.astype(np.int64)), responses=responses, **columns)

    @classmethod
    def concat(cls, batches: Sequence[SampleBatch]) -> SampleBatch:
        """All samples of `batches`; rows of equal prompts of one group are stored once."""
        if not batches:
            raise WireError("concat of no batches")
        rows: list[npt.NDArray[Any]] = []
        seen: dict[tuple[int, bytes], int] = {}
        prompt: list[int] = []
        for batch in batches:
            own = batch.prompts.rows()
            for group, row in zip(batch.group.tolist(), batch.prompt.tolist(), strict=True):
                identity = (group, own[row].tobytes())
                if identity not in seen:
                    seen[identity] = len(rows)
                    rows.append(own[row])
                prompt.append(seen[identity])

        columns = {name: np.concatenate([getattr(b, name) for b in batches]) for name in (*OF_SAMPLE, *OF_TOKEN)}
        columns["prompt"] = np.array(prompt, dtype=np.int32)
        if experts := [batch.experts for batch in batches if batch.experts is not None]:
            columns["experts"] = np.concatenate(experts)  # others have no token yet
        flat, lengths = (np.concatenate([getattr(b.responses, name) for b in batches]) for name in ("flat", "lengths"))
        return cls(prompts=Ragged.from_rows(rows, np.int32), responses=Ragged(flat, lengths), **columns)

    @property
    def turns(self) -> Ragged:
        """Of each response token, the turn that it belongs to (int32, from 0); -1 where it was given. A turn is a run
        of tokens that the policy chose: an environment's answer is never empty."""
        chosen = self.mask == 1
        begins = chosen & ~np.concatenate(([False], chosen[:-1]))
        first = self.responses.offsets[:-1][self.responses.lengths > 0]
        begins[first] = chosen[first]
        number = np.cumsum(begins)
        offsets = np.concatenate(([0], number))[self.responses.offsets[:-1]]
        within = number - 1 - np.repeat(offsets, self.responses.lengths)
        return Ragged(np.where(chosen, within, -1).astype(np.int32), self.responses.lengths)

    def in_order(self) -> SampleBatch:
        """Sorted by (group, index): the order in which samples are trained, whatever order they arrived in."""
        return self.select(np.lexsort((self.index, self.group)))

    def encode(self) -> bytes:
        tensors: dict[str, npt.NDArray[Any]] = {name: getattr(self, name) for name in (*OF_SAMPLE, *self._of_token)}
        for name, rows in (("prompt", self.prompts), ("response", self.responses)):
            tensors |= {f"{name}_tokens": rows.flat.astype(np.int32, copy=False), f"{name}_lengths": rows.lengths}
        return safetensors_save(tensors)

    @classmethod
    def decode(cls, data: bytes) -> SampleBatch:
        """Raises WireError for bytes that are no encoded SampleBatch."""
        try:
            t = safetensors_load(data)
            prompts, responses = (Ragged(t[f"{name}_tokens"], t[f"{name}_lengths"]) for name in ("prompt", "response"))
            columns = {name: t[name] for name in (*OF_SAMPLE, *OF_TOKEN)}
            return cls(prompts=prompts, responses=responses, **columns, experts=t.get("experts"))
        except (SafetensorError, KeyError) as error:
            raise WireError(f"not an encoded SampleBatch: {error}") from error


@dataclass(frozen=True)
class Columns:
    """What a stage says about samples, to be joined to them by (group, index).

    `sample` columns hold one float32 per sample ([S], e.g. "score"), `token` columns one per response token, in the
    order of the samples (flat, lengths in `lengths` [S], e.g. "ref_logprobs", "values"), or K of them ([tokens, K]).
    """

    group: Int
    index: Int
    lengths: Int
    sample: Mapping[str, Float] = field(default_factory=dict)
    token: Mapping[str, Float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count, tokens = len(self.group), int(self.lengths.sum())
        if len(self.index) != count or len(self.lengths) != count:
            raise WireError("Columns: group, index and lengths differ in rows")
        for name, values in self.sample.items():
            if len(values) != count:
                raise WireError(f"Columns: sample column {name!r} has {len(values)} values for {count} samples")
        for name, values in self.token.items():
            if len(values) != tokens:
                raise WireError(f"Columns: token column {name!r} has {len(values)} values for {tokens} tokens")

    @property
    def keys(self) -> list[tuple[int, int]]:
        """(group, index) of each sample."""
        return _keys(self.group, self.index)

    @classmethod
    def of(
        cls, batch: SampleBatch, *, sample: Mapping[str, Float] | None = None, token: Mapping[str, Float] | None = None
    ) -> Columns:
        return cls(batch.group, batch.index, batch.responses.lengths, dict(sample or {}), dict(token or {}))

    @classmethod
    def align(cls, batch: SampleBatch, parts: Sequence[Columns]) -> Columns:
        """Joins `parts` (any split of the samples, any set of columns) to `batch`, in its order.

        Raises WireError naming the first sample (group, index) that a column lacks, or that two parts both give.
        """
        at = {key: i for i, key in enumerate(batch.keys)}
        lengths, offsets = batch.responses.lengths, batch.responses.offsets
        sample: dict[str, Float] = {}
        token: dict[str, Float] = {}
        filled: dict[str, npt.NDArray[np.bool_]] = {}
        for part in parts:
            rows = [at.get(key, -1) for key in part.keys]
            for name, is_token in [(n, False) for n in part.sample] + [(n, True) for n in part.token]:
                values = part.token[name] if is_token else part.sample[name]
                target = token if is_token else sample
                size = int(lengths.sum()) if is_token else len(batch)
                column = target.setdefault(name, np.zeros((size, *values.shape[1:]), np.float32))
                done = filled.setdefault(name, np.zeros(len(batch), np.bool_))
                source = Ragged(values, part.lengths).rows() if is_token else list(values)
                for row, value in zip(rows, source, strict=True):
                    if row < 0:
                        continue
                    who = f"sample (group {batch.group[row]}, index {batch.index[row]})"
                    if done[row]:
                        raise WireError(f"column {name!r} is given twice for {who}")
                    done[row] = True
                    if not is_token:
                        column[row] = value
                    elif len(value) != lengths[row]:
                        raise WireError(f"column {name!r} has {len(value)} values for {lengths[row]} tokens of {who}")
                    else:
                        column[offsets[row] : offsets[row + 1]] = value
        for name, done in filled.items():
            if not done.all():
                row = int(np.argmin(done))
                raise WireError(f"column {name!r} lacks sample (group {batch.group[row]}, index {batch.index[row]})")
        return cls(batch.group, batch.index, lengths, sample, token)

    def encode(self) -> bytes:
        tensors: dict[str, npt.NDArray[Any]] = {"group": self.group, "index": self.index, "lengths": self.lengths}
        tensors |= {f"sample.{k}": np.asarray(v, np.float32) for k, v in self.sample.items()}
        tensors |= {f"token.{k}": np.asarray(v, np.float32) for k, v in self.token.items()}
        return safetensors_save(tensors)

    @classmethod
    def decode(cls, data: bytes) -> Columns:
        try:
            t = safetensors_load(data)
            return cls(
                t["group"],
                t["index"],
                t["lengths"],
                {k.removeprefix("sample."): v for k, v in t.items() if k.startswith("sample.")},
                {k.removeprefix("token."): v for k, v in t.items() if k.startswith("token.")},
            )
        except (SafetensorError, KeyError) as error:
            raise WireError(f"not encoded Columns: {error}") from error


def unrouted(like: npt.NDArray[Any], tokens: int) -> npt.NDArray[Any]:
    """The experts of so many tokens of which nobody says: those that a trainer's own router chooses."""
    return np.full((tokens, *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)


def _keys(group: Int, index: Int) -> list[tuple[int, int]]:
    return list(zip(group.tolist(), index.tolist(), strict=True))
