"""Continuous batching on one replica, in time: when each sample of a call finishes. An event per finished sample.

Samples wait in their order for a slot and for room for their keys and values (their whole length is reserved: nothing
is preempted). A sample that is let in has its prompt, and the tokens it came with, computed first, or their keys and
values taken up; a prompt is computed once per call, a head that all prompts share once. Then all active samples take a
step together, in a + b n + c m seconds (planner/latency.py), until the next of them is done.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.planner.arrays import Array
from orchestrator.planner.latency import GenerateCost


@dataclass(frozen=True)
class Item:
    """A sample: tokens of its prompt, tokens of response it has, and those it will have had when it is done."""

    prompt: int
    """Which prompt of the call; samples of one prompt share its prefill."""
    prompt_tokens: int
    done: int
    final: int


@dataclass(frozen=True)
class Schedule:
    """Seconds from the call's start. Between two breakpoints all active samples advance at an even pace."""

    finish_s: Array
    """[S], in the order of the items."""
    begin_step: Array
    """[S]: the step before which each was let in."""
    break_s: Array
    break_step: Array
    prefill_tokens: int
    shared_tokens: int
    moved_tokens: int
    decode_tokens: int
    prefill_s: float
    moved_s: float
    decode_s: float

    @property
    def steps(self) -> int:
        return int(self.break_step[-1])

    def tokens_at(self, time_s: float, items: Sequence[Item]) -> list[int]:
        """Response tokens that each sample has at `time_s`."""
        step = np.floor(np.interp(time_s, self.break_s, self.break_step) + 1e-9)
        made = np.maximum(0, step - self.begin_step).astype(int)
        return [min(i.final, i.done + int(m)) for i, m in zip(items, made, strict=True)]


def schedule(
    items: Sequence[Item], cost: GenerateCost, *, slots: int, kv_tokens: int | None, head_tokens: int = 0,
    share_prefixes: bool = True,
) -> Schedule:  # fmt: skip
    """Raises ValueError for a sample that is longer than the KV capacity, or that has all its tokens already."""
    room = float("inf") if kv_tokens is None else float(kv_tokens)
    finish_s, begin = np.zeros(len(items)), np.zeros(len(items))
    active: list[tuple[int, int]] = []
    known: set[int] = set()
    now_s, step, held, reserved = cost.call_s, 0, 0.0, 0.0
    prefill_tokens = shared = moved_tokens = decode_tokens = 0
    prefill_s = moved_s = decode_s = 0.0
    break_s, break_step = [now_s], [0]
    waiting = 0
    while active or waiting < len(items):
        admitted = came = 0
        while waiting < len(items) and len(active) < slots:
            item = items[waiting]
            if item.final <= item.done:
                raise ValueError(f"a sample with {item.done} of {item.final} tokens has nothing left to decode")
            if item.prompt_tokens + item.final > room:
                raise ValueError(f"a sample of {item.prompt_tokens} + {item.final} tokens in a KV capacity of {room:g}")
            if reserved + item.prompt_tokens + item.final > room:
                break
            if item.done and cost.moved_token_s is not None:
                came += item.prompt_tokens + item.done
            else:
                new = item.prompt_tokens
                if share_prefixes:
                    new = 0 if item.prompt in known else item.prompt_tokens - (head_tokens if known else 0)
                    known.add(item.prompt)
                shared += item.prompt_tokens - new
                admitted += new + item.done
            begin[waiting] = step
            heapq.heappush(active, (step + item.final - item.done, waiting))
            held += item.prompt_tokens + item.done
            reserved += item.prompt_tokens + item.final
            waiting += 1
        if admitted or came:
            prefill_tokens += admitted
            moved_tokens += came
            first_s, taken_s = cost.prefill_token_s * admitted, (cost.moved_token_s or 0.0) * came
            prefill_s += first_s
            moved_s += taken_s
            now_s += first_s + taken_s
            break_s.append(now_s)
            break_step.append(step)
        until = active[0][0]
        n, delta = len(active), until - step
        spent = delta * (cost.step_s + cost.sequence_s * n + cost.kv_token_s * held)
        spent += cost.kv_token_s * n * delta * delta / 2
        now_s, step = now_s + spent, until
        decode_s += spent
        decode_tokens += n * delta
        held += n * delta
        break_s.append(now_s)
        break_step.append(step)
        while active and active[0][0] == step:
            _, i = heapq.heappop(active)
            finish_s[i] = now_s
            held -= items[i].prompt_tokens + items[i].final
            reserved -= items[i].prompt_tokens + items[i].final
    return Schedule(
        finish_s, begin, np.array(break_s), np.array(break_step, dtype=np.float64),
        prefill_tokens, shared, moved_tokens, decode_tokens, prefill_s, moved_s, decode_s,
    )  # fmt: skip
