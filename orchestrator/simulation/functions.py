"""What simulated functions do with a call: real inputs and outputs in the exchange, time by the latency model.

The values are fake, but fixed: tokens, scores and weights depend on the samples' identity alone, never on how a policy
arranged the work, so that the committed history of two policies can be compared.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import xxhash

from functions.base.samples import Columns, Finish, Ragged, SampleBatch
from functions.base.wire import Call, Event, Hint, Json, Version, hint_key
from functions.exchange.base import NotFound
from orchestrator.planner.latency import GenerateCost, WorkCost
from orchestrator.planner.prefixes import Prefixes
from orchestrator.simulation.clock import TICK_S
from orchestrator.simulation.decoding import Item, Schedule, schedule
from orchestrator.simulation.lengths import Lengths, Turns
from orchestrator.simulation.memory import MemoryExchange

HEARTBEAT_S = 5.0
HELD = 2
"""Versions that a replica of reference holds (functions/reference/function.py); an engine holds one."""
Events = AsyncGenerator[Event, None]


@dataclass(frozen=True)
class Generate:
    """A model of `generate`: continuous batching on one replica."""

    cost: GenerateCost
    lengths: Lengths
    start_s: float
    """From nothing to a replica that takes calls."""
    load_s: float
    """To take up a version of the policy that the replica does not hold,"""
    delta_s: float
    """and one where it holds the version before (docs/weights.md)."""
    slots: int = 64
    kv_tokens: int | None = None
    share_prefixes: bool = True
    back_s: float | None = None
    """From parked to a replica that takes calls; None: it does not park."""
    leave_s: float = 0.0
    """Until what has parked has left its GPUs."""


@dataclass(frozen=True)
class Work:
    """A model of reward, reference, a critic or train."""

    kind: Literal["environment", "reward", "reference", "train"]
    cost: WorkCost
    """Of train: of one rank."""
    start_s: float
    load_s: float = 0.0
    delta_s: float = 0.0
    """As of Generate."""
    state_s: float = 0.0
    """Of train: for one rank alone to read weights and optimizer state before the step, and again to write them after
    it; a gang's ranks share it."""
    back_s: float | None = None
    leave_s: float = 0.0
    """As of Generate."""
    turns: Turns | None = None
    """Of an environment,"""
    asked: dict[tuple[int, int], float] = field(default_factory=dict, compare=False)
    """and when its answers will be there to samples (group, index) of a call that was cut."""


Model = Generate | Work


@dataclass
class Held:
    """What a replica has in memory."""

    name: str
    versions: list[Version] = field(default_factory=list)
    """The latest used is last."""
    calls: int = 0
    ahead: list[tuple[Version, float, float]] = field(default_factory=list)
    """What it loads before its first call: from when, until when."""

    def load_ahead(self, hinted: Sequence[Version], model: Model, now_s: float) -> None:
        """As the replica starts, one version after the other."""
        for version in hinted:
            end_s = now_s + self.take_up_s([version], model)
            self.ahead.append((version, now_s, end_s))
            now_s = end_s

    def first_call_s(self, now_s: float) -> tuple[float, float]:
        """What the first call waits for, and what was over before it: what has not begun to load is left."""
        begun = [(from_s, until_s) for _, from_s, until_s in self.ahead if from_s <= now_s]
        self.versions = [v for v in self.versions if v not in [left for left, _, _ in self.ahead[len(begun) :]]]
        if not begun:
            return 0.0, 0.0
        return max(0.0, begun[-1][1] - now_s), min(now_s, begun[-1][1]) - begun[0][0]

    def take_up_s(self, used: Sequence[Version], model: Model) -> float:
        """Seconds to take up those of the versions that the replica does not hold."""
        found = 0.0
        for version in used:
            if version not in self.versions:
                before = any(v.model == version.model and v.number == version.number - 1 for v in self.versions)
                found += model.delta_s if before else model.load_s
        held = [version for version in self.versions if version not in used] + list(used)
        self.versions = held[-HELD if isinstance(model, Work) else -1 :]
        return found


def hinted(function: str, exchange: MemoryExchange) -> list[Version]:
    """What the hint of `function` names (functions/server/preload.py), in its order."""
    try:
        hint = Hint.from_json(json.loads(exchange.get(hint_key(function))))
    except NotFound:
        return []
    return [version for load in hint.loads for version in load.weights.values()]


async def busy(seconds: float) -> Events:
    """That much time, with a heartbeat."""
    while seconds > HEARTBEAT_S:
        await asyncio.sleep(HEARTBEAT_S)
        yield Event("progress")
        seconds -= HEARTBEAT_S
    await asyncio.sleep(seconds)
    yield Event("progress")


async def generate(call: Call, model: Generate, exchange: MemoryExchange) -> Events:
    clock = asyncio.get_running_loop().time
    start_s, number = clock(), 0
    batch = exchange.samples(call.inputs["samples"])
    items = _items(batch, call, model.lengths)
    head = Prefixes([row.tolist() for row in batch.prompts.rows()]).head
    try:
        plan = schedule(
            items, model.cost, slots=model.slots, kv_tokens=model.kv_tokens, head_tokens=head,
            share_prefixes=model.share_prefixes,
        )  # fmt: skip
    except ValueError as error:
        yield Event("error", data={"kind": "fatal", "message": str(error)})
        return
    cut, spent_s = exchange.watch(call.cut_key), float(plan.break_s[-1])
    order = np.argsort(plan.finish_s, kind="stable").tolist()
    chunk = int(call.params["chunk"])
    sent = 0
    try:
        while sent < len(order):
            stop = min(sent + chunk, len(order))
            while stop < len(order) and plan.finish_s[order[stop]] == plan.finish_s[order[stop - 1]]:
                stop += 1
            due_s = start_s + float(plan.finish_s[order[stop - 1]])
            while (left_s := due_s - clock()) > TICK_S and not cut.is_set():
                if not await set_within(cut, min(HEARTBEAT_S, left_s)):
                    yield Event("progress")
            if left_s > TICK_S:
                break
            rows = order[sent:stop]
            yield samples_event(call, exchange, batch, rows, [items[i].final for i in rows], number)
            number, sent = number + 1, stop
        left = order[sent:]
        if left:
            spent_s = now_s = clock() - start_s
            done = [i for i in left if plan.finish_s[i] <= now_s]  # finished, waiting for their chunk to fill
            if done:
                yield samples_event(call, exchange, batch, done, [items[i].final for i in done], number)
                number += 1
            left = [i for i in left if plan.finish_s[i] > now_s]
            tokens, parts = plan.tokens_at(now_s, items), int(call.params.get("cut_parts", 1))
            held = sum(items[i].prompt_tokens + tokens[i] for i in left if tokens[i])
            async for beat in busy(held * (model.cost.moved_token_s or 0.0)):
                yield beat
            for part in (left[k::parts] for k in range(min(parts, len(left)))):
                yield samples_event(call, exchange, batch, part, [tokens[i] for i in part], number, kind="cut")
                number += 1
    finally:
        exchange.unwatch(call.cut_key)
    yield Event("done", data=_stats(plan, spent_s, items))


async def set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _items(batch: SampleBatch, call: Call, lengths: Lengths) -> list[Item]:
    cap = int(call.params["max_response_length"])
    rows, have = batch.prompts.rows(), batch.responses.lengths.tolist()
    items = []
    for k, (row, (group, index)) in enumerate(zip(batch.prompt.tolist(), batch.keys, strict=True)):
        ends = [lengths.length(call.step, group, index, rows[row])]
        if isinstance(lengths, Turns):
            ends = [n for n in lengths.ends(call.step, group, index, rows[row]) if n > have[k]]
        final = min(cap, ends[0])
        items.append(Item(row, len(rows[row]), have[k], final))
    return items


def samples_event(
    call: Call, exchange: MemoryExchange, batch: SampleBatch, rows: list[int], tokens: list[int], number: int,
    *, kind: Literal["samples", "cut"] = "samples", finish: Finish = Finish.STOP,
) -> Event:  # fmt: skip
    """Of samples that have so many tokens; `finish`: of those that are no longer than they may be."""
    picked = batch.select(rows)
    identities = zip(picked.keys, tokens, strict=True)
    responses = Ragged.from_rows([_tokens(call.step, g, i, n) for (g, i), n in identities], np.int32)
    cap = int(call.params["max_response_length"])
    ended = [Finish.UNFINISHED if kind == "cut" else Finish.LENGTH if n >= cap else finish for n in tokens]
    total = len(responses.flat)
    made = SampleBatch(
        picked.prompts, picked.prompt, picked.group, picked.index, responses,
        np.full(total, -1.0, np.float32), np.ones(total, np.float32), np.array(ended, np.int32),
        np.full(len(rows), call.weights["policy"].number, np.int32),
    )  # fmt: skip
    ref = exchange.put(f"{call.prefix}{kind}.{number:04d}", made.encode())
    return Event(kind, ref, made.about)


def _tokens(step: int, group: int, index: int, count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    first = xxhash.xxh3_64_intdigest(f"{step}/{group}/{index}".encode()) % 1000
    return (first + 7 * np.arange(count, dtype=np.int64)).astype(np.int32) % 1000


def _stats(plan: Schedule, spent_s: float, items: list[Item]) -> Json:
    """EngineStats; of a call that was cut, in proportion to its time."""
    whole = float(plan.break_s[-1])
    share = 1.0 if spent_s >= whole or whole == 0 else spent_s / whole
    steps = float(np.interp(spent_s, plan.break_s, plan.break_step))
    made = sum(t - i.done for t, i in zip(plan.tokens_at(spent_s, items), items, strict=True))
    return {
        "prefill_tokens": plan.prefill_tokens,
        "shared_tokens": plan.shared_tokens,
        "moved_tokens": plan.moved_tokens,
        "decode_tokens": int(made),
        "decode_steps": int(steps),
        "prefill_s": plan.prefill_s,
        "moved_s": plan.moved_s,
        "decode_s": plan.decode_s * share,
    }


async def work(call: Call, model: Work, exchange: MemoryExchange) -> Events:
    batch = exchange.samples(call.inputs["samples"])
    samples, tokens = len(batch), int(batch.token_counts.sum())
    async for beat in busy(model.cost.work_s(samples, tokens)):
        yield beat
    columns = _reward(call, batch) if model.kind == "reward" else _token_column(call, batch)
    ref = exchange.put(f"{call.prefix}columns", columns.encode())
    yield Event("done", ref, {"failed": [], "samples": samples, "tokens": tokens})


def _reward(call: Call, batch: SampleBatch) -> Columns:
    score = [(xxhash.xxh3_64_intdigest(f"{call.step}/{g}/{i}/score".encode()) >> 11) / 2.0**53 for g, i in batch.keys]
    return Columns.of(batch, sample={"score": np.array(score, np.float32)})


def _token_column(call: Call, batch: SampleBatch) -> Columns:
    name = str(call.params["column"])
    return Columns.of(batch, token={name: np.full(len(batch.responses.flat), -1.0, np.float32)})
