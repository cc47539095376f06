"""The train function in simulations: a gang of ranks, streamed or with all samples at once, in virtual time.

Rank 0 does what the gang does, in the gang's time; the others are there, and end with it. N ranks share the samples
evenly, but none does less than one sample: a batch takes max(sum of its work / N, its longest sample's).
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping

from functions.base.samples import SampleBatch
from functions.base.wire import Call, Event, FeedPart, Version
from functions.exchange.base import NotFound, checksum
from functions.weights.blobs import Blob, publish_blobs
from orchestrator.simulation.functions import HEARTBEAT_S, Events, Work, busy, set_within
from orchestrator.simulation.memory import MemoryExchange


async def train(call: Call, model: Work, exchange: MemoryExchange) -> Events:
    """The call's events, of any rank."""
    gang = call.params.get("gang", {"id": call.id, "size": 1, "rank": 0, "attempt": ""})
    size, prefix = int(gang["size"]), f"gang/{gang['id']}/{gang['attempt']}/"
    if size > 1:
        exchange.put(f"{prefix}rank-{gang['rank']:04d}", b"here")
    if gang["rank"]:
        async for beat in _until(f"{prefix}done", exchange):
            yield beat
        yield Event("done", data=json.loads(exchange.get(f"{prefix}done")))
        return
    for rank in range(1, size):
        async for beat in _until(f"{prefix}rank-{rank:04d}", exchange):
            yield beat
    async for beat in busy(model.cost.call_s + model.state_s / size):
        yield beat
    clock = asyncio.get_running_loop().time
    begin_s, worked_s, identity = clock(), 0.0, str(gang["id"])
    streams = call.params.get("feed", {}).get("stream", True)
    batches: list[SampleBatch] = []
    async for item in _batches(call, exchange):
        if isinstance(item, Event):
            yield item
            continue
        found, name = item
        identity = name or identity
        if found is not None:
            batches.append(found)
            if streams:
                work_s = _batch_s(model, found, size)
                worked_s += work_s
                async for beat in busy(work_s):
                    yield beat
    waited_s = clock() - begin_s - worked_s
    if not streams:
        async for beat in busy(_batch_s(model, SampleBatch.concat(batches), size)):
            yield beat
    async for beat in busy(model.state_s / size):
        yield beat
    done = _trained(call, SampleBatch.concat(batches), identity, exchange, {"ranks": size}, waited_s)
    if size > 1:
        exchange.put(f"{prefix}done", json.dumps(dict(done.data)).encode())
    yield done


def _batch_s(model: Work, batch: SampleBatch, ranks: int) -> float:
    cost, counts = model.cost, batch.token_counts
    whole_s = cost.sample_s * len(batch) + cost.token_s * float(counts.sum())
    return max(whole_s / ranks, cost.sample_s + cost.token_s * float(counts.max()))


async def _batches(
    call: Call, exchange: MemoryExchange
) -> AsyncIterator[Event | tuple[SampleBatch | None, str]]:  # fmt: skip
    """Samples as they come, each time all that are there, and in the end what the version is named after; heartbeats
    while it waits."""
    if "feed" not in call.params:
        yield exchange.samples(call.inputs["samples"]), ""
        return
    prefix, number, identity = call.params["feed"]["prefix"], 0, ""
    waiting: list[SampleBatch] = []
    while not identity:
        async for beat in _until(f"{prefix}{number:06d}", exchange):
            yield beat
        groups = set[int]()
        while not identity:
            try:
                part = FeedPart.from_json(json.loads(exchange.get(f"{prefix}{number:06d}")))
            except NotFound:
                break
            waiting += [exchange.samples([ref]) for ref in part.samples]
            groups |= set(part.groups)
            number, identity = number + 1, part.identity
        whole = SampleBatch.concat(waiting) if waiting else None
        if whole is None or not groups:
            yield None, identity
            continue
        here = [group in groups for group in whole.group.tolist()]
        waiting = [whole.select([row for row, inside in enumerate(here) if not inside])]
        yield whole.select([row for row, inside in enumerate(here) if inside]), identity


async def _until(key: str, exchange: MemoryExchange) -> Events:
    """Heartbeats until there is a value under `key`."""
    event = exchange.watch(key)
    while not await set_within(event, HEARTBEAT_S):
        yield Event("progress")


def _trained(
    call: Call, batch: SampleBatch, identity: str, exchange: MemoryExchange, stats: Mapping[str, int], waited_s: float
) -> Event:
    """The next version: its one tensor is a digest of the version before and of the samples, whatever their order."""
    rows = zip(batch.keys, batch.responses.rows(), strict=True)
    seen = sorted((*key, checksum(row.tobytes())) for key, row in rows)
    model, before = str(call.params["model"]), call.weights["policy"]
    parent = exchange.list(before.prefix)
    state = checksum(repr((model, before.number, seen)).encode())
    after = Version(model, before.number + 1, checksum(identity.encode())[:12])
    blob = Blob("U8", (16,), memoryview(bytes.fromhex(state)))
    publish_blobs(
        exchange, after, tensors={"state": blob}, state={}, trainer={}, files={},
        parent=before if parent else None,
    )  # fmt: skip
    counts = {"samples": len(batch), "tokens": int(batch.token_counts.sum()), **stats}
    metrics = {f"{model}/tokens": float(batch.responses.lengths.sum())}
    told = {"metrics": metrics, "stats": counts, "waited_s": waited_s, "durable": True}
    return Event("done", data={"version": after.to_json(), **told})
