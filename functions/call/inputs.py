"""The inputs of a call that are samples: read, joined, put in order."""

from collections.abc import Collection, Sequence
from itertools import pairwise

from functions.base.samples import Finish, SampleBatch
from functions.base.wire import Call
from functions.call.function import FatalError
from functions.exchange.base import Exchange


def read_samples(call: Call, exchange: Exchange, *, begun: bool = True) -> SampleBatch:
    """`joined` of the call's samples."""
    refs = call.inputs.get("samples", ())
    return joined(call, [SampleBatch.decode(exchange.get(ref)) for ref in refs], begun=begun)


def joined(call: Call, parts: Sequence[SampleBatch], *, begun: bool = True) -> SampleBatch:
    """The call's finished samples, sorted by (group, index): in which parts and order they arrived does not matter.

    Raises FatalError for a call without samples, with an unfinished sample (that has tokens, where they may be not
    `begun`), or with the same sample twice.
    """
    if not parts:
        raise FatalError(f"call {call.id}: operation {call.operation!r} wants inputs 'samples'")
    batch = SampleBatch.concat(parts).in_order()
    if not len(batch):
        raise FatalError(f"call {call.id}: its samples are empty")
    for earlier, later in pairwise(batch.keys):
        if earlier == later:
            raise FatalError(f"call {call.id}: sample (group {later[0]}, index {later[1]}) is given twice")
    waits = (batch.finish == Finish.UNFINISHED) & (begun | (batch.responses.lengths > 0))
    for row in waits.nonzero()[0][:1]:
        group, index = batch.keys[row]
        raise FatalError(f"call {call.id}: sample (group {group}, index {index}) is unfinished")
    return batch


def without(batch: SampleBatch, dropped: Collection[tuple[int, int]]) -> SampleBatch:
    """The batch without the samples named (group, index)."""
    kept = [row for row, key in enumerate(batch.keys) if key not in dropped]
    return batch if len(kept) == len(batch) else batch.select(kept)


def sample_name(batch: SampleBatch, row: int) -> str:
    return f"sample (group {batch.group[row]}, index {batch.index[row]})"
