"""Who of a gang reads what of a step's samples and columns: the transfer protocols, by HybridFlow's and verl's names.

    all ranks as dp   values are dealt over all ranks, by size: each leaves the exchange once, whole, and is checked
    one-to-all        what targets follow from: who, prompts, lengths, masks, scores, values, ...       to all ranks
    3d                what packs alone read: tokens, experts, a teacher's top-k, ...      to ranks that have the pack:
                      divided over dp, the same along cp, pp and tp
A rank that trains alone reads everything. Which packs a rank has follows from lengths and masks (parallel.py: share).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from functions.base.samples import Columns, Ragged, SampleBatch
from functions.base.wire import Ref
from functions.call.train_params import TrainParams
from functions.exchange.base import Exchange
from functions.train.batch import TrainBatch
from functions.train.gang import Ranks

Key = tuple[int, int]
Array = npt.NDArray[Any]
SAMPLES = 64
"""That each rank is sent at once."""


def all_as_dp(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank that reads each of the values: the largest first, each the one with the least so far."""
    loads, found = [0] * ranks, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        found[number] = loads.index(min(loads))
        loads[found[number]] += sizes[number]
    return found


def of_packs(name: str, params: TrainParams) -> bool:
    """Whether packs alone read this value of each token (3d); else targets, totals or checks want all (one-to-all)."""
    if params.resample is not None:  # packs are of samples that are drawn later
        return False
    if name == "token.ref_logprobs":
        in_reward = params.kl is not None and params.kl.where == "reward"
        return not in_reward and params.advantage != "distillation" and ":" not in params.advantage
    if name == "logprobs":
        return not params.corrects_whole
    return name in ("responses", "experts", "token.teacher_logprobs", "token.teacher_ids")


@dataclass(frozen=True)
class _Source:
    """Of a value by token: who reads those of each sample, and its form."""

    reader: dict[Key, int]
    dtype: np.dtype[Any]
    tail: tuple[int, ...]


class Inputs:
    """A step's samples and columns as they come to one rank. Of a gang all ranks make the same calls in turn."""

    def __init__(self, ranks: Ranks, models: Sequence[TrainParams], exchange: Exchange) -> None:
        self._ranks, self._models, self._exchange = ranks, models, exchange
        self._own: dict[tuple[str, Key], Array] = {}
        """What this rank has read for packs, of each sample."""
        self._sources: dict[str, _Source] = {}

    def read(self, samples: Sequence[Ref], columns: Sequence[Ref]) -> tuple[list[SampleBatch], list[Columns]]:
        """In the order given; of a gang what packs alone read is empty, until `filled`."""
        refs, ranks = [*samples, *columns], self._ranks
        kinds: list[type[SampleBatch | Columns]] = [SampleBatch] * len(samples) + [Columns] * len(columns)
        readers = all_as_dp([ref.size_bytes for ref in refs], ranks.size)
        parts = {
            number: kinds[number].decode(self._exchange.get(refs[number]))
            for number in range(len(refs))
            if readers[number] == ranks.rank
        }
        if ranks.mesh is not None:
            parts = self._to_all(parts, kinds, readers)
        every = [parts[number] for number in range(len(refs))]
        return [p for p in every if isinstance(p, SampleBatch)], [p for p in every if isinstance(p, Columns)]

    def _to_all(
        self, parts: Mapping[int, SampleBatch | Columns], kinds: Sequence[type[SampleBatch | Columns]],
        readers: Sequence[int],
    ) -> dict[int, SampleBatch | Columns]:  # fmt: skip
        sent, found = dict[int, bytes](), dict[int, SampleBatch | Columns]()
        for number, part in parts.items():
            kept = self._packed(part)
            empty = {name: np.zeros((len(v), 0, *v.shape[1:]), v.dtype) for name, v in kept.items()}
            sent[number] = _with(part, empty).encode()  # [tokens, 0, ...]
            lengths = part.responses.lengths if isinstance(part, SampleBatch) else part.lengths
            for name, values in kept.items():
                rows = zip(part.keys, Ragged(values, lengths).rows(), strict=True)
                self._own |= {(name, key): row for key, row in rows}
        told = self._ranks.gather({"sizes": [(number, len(data)) for number, data in sent.items()]})
        for said, data in zip(told, self._ranks.gather_bytes(b"".join(sent.values())), strict=True):
            at = 0
            for number, size in said["sizes"]:
                found[number] = kinds[number].decode(data[at : at + size])
                at += size
        for number, part in found.items():
            for name, none in self._packed(part).items():
                source = self._sources.setdefault(name, _Source({}, none.dtype, none.shape[2:]))
                source.reader.update(dict.fromkeys(part.keys, readers[number]))
        return found

    def _packed(self, part: SampleBatch | Columns) -> dict[str, Array]:
        """What packs alone read of `part`, by token."""
        if isinstance(part, SampleBatch):
            values: dict[str, Array] = {"responses": part.responses.flat, "logprobs": part.logprobs}
            values |= {} if part.experts is None else {"experts": part.experts}
        else:
            values = {f"token.{name}": column for name, column in part.token.items()}
        return {name: v for name, v in values.items() if all(of_packs(name, params) for params in self._models)}

    def filled(self, batch: TrainBatch, rows: Callable[[], Collection[int]]) -> TrainBatch:
        """`batch` with what packs read of this rank's samples `rows`; of others zeros, whose pages nobody touches."""
        ranks, samples = self._ranks, batch.samples
        if ranks.mesh is None:
            return batch
        count, wanted = len(samples.mask), [told["rows"] for told in ranks.gather({"rows": sorted(rows())})]
        flat = {name: np.zeros((count, *of.tail), of.dtype) for name, of in sorted(self._sources.items())}
        for start in range(0, max(map(len, wanted)), SAMPLES):
            self._move(flat, samples, [asked[start : start + SAMPLES] for asked in wanted])
        samples = _with(samples, {name: v for name, v in flat.items() if not name.startswith("token.")})
        token = {name: torch.from_numpy(flat[f"token.{name}"]) if f"token.{name}" in flat else values
                 for name, values in batch.token.items()}  # fmt: skip
        return replace(batch, samples=samples, rollout_logprobs=torch.from_numpy(samples.logprobs), token=token)

    def _move(self, flat: Mapping[str, Array], samples: SampleBatch, wanted: Sequence[Sequence[int]]) -> None:
        """Fills `flat`: each rank's wanted rows come from those that have read them."""
        me, keys, offsets = self._ranks.rank, samples.keys, samples.responses.offsets
        parts: list[list[Array]] = []
        for asked in wanted:
            mine = [(name, keys[row]) for name in flat for row in asked if self._sources[name].reader[keys[row]] == me]
            parts.append([np.ascontiguousarray(self._own[item]).reshape(-1).view(np.uint8) for item in mine])
        places: list[list[Array]] = [[] for _ in wanted]
        for name, values in flat.items():
            for row in wanted[me]:
                reader = self._sources[name].reader[keys[row]]
                places[reader].append(values[offsets[row] : offsets[row + 1]].reshape(-1).view(np.uint8))
        sent = np.concatenate([np.zeros(0, np.uint8), *(part for peer in parts for part in peer)])
        to, of = ([sum(len(part) for part in peer) for peer in side] for side in (parts, places))
        received, at = self._ranks.swap(torch.from_numpy(sent).to(self._ranks.device), to, of).cpu().numpy(), 0
        for place in (place for peer in places for place in peer):
            place[:] = received[at : at + len(place)]
            at += len(place)


def _with(part: SampleBatch | Columns, values: Mapping[str, Array]) -> Any:
    """`part` with these `values` by token in the place of its own."""
    if isinstance(part, Columns):
        return replace(part, token={**part.token, **{name.removeprefix("token."): v for name, v in values.items()}})
    responses = Ragged(values.get("responses", part.responses.flat), part.responses.lengths)
    own: dict[str, Any] = {name: v for name, v in values.items() if name != "responses"}
    return replace(part, responses=responses, **own)
