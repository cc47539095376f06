"""Call a function: an exactly-once view of events over at-least-once attempts.

    invoke --attempt 1--> platform.call: started, samples A, samples B, (lost)      -> A, B
           --attempt 2--> platform.call: started, samples A, samples B, samples C, done   -> C, done

A repeated call sends what earlier attempts recorded again, under the same refs (functions/server/attempt.py); what has
been yielded is not yielded again. An attempt is lost when its stream ends without its last line, or is silent for
longer than the heartbeat allows. Lost attempts and retryable errors are tried again after a pause that doubles; the
number of attempts counts from the last one that brought something new. An attempt that could not reach the store is
none: the store is waited for (base/outages.py), and while it is, the call wants no replica.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass
from typing import Literal, cast

from opentelemetry.trace import Span

from functions.base.wire import Call, Event, Ref, made_in_a_step, on_a_node
from functions.call.meter import Told
from orchestrator.base.clock import now_s
from orchestrator.base.errors import Away, CallFailed, ValueLost
from orchestrator.base.outages import Outages
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.calls.tracing import Tracing
from orchestrator.planner.base import CallObservation
from orchestrator.platforms.base import CallLost, Platform

CUT_LIFETIME_S = 86400.0
Ended = Callable[[str, Literal["done", "lost", "failed"], CallObservation | None], None]
"""Hears of a function, how an attempt at a call of it has ended, and what one that is done took."""
Idle = Callable[[], AbstractAsyncContextManager[None]]
"""Entered for as long as a call waits for what is away."""


async def _nothing() -> None:
    pass


@dataclass(frozen=True)
class RetryPolicy:
    """Pause before attempt k + 1: base_s * factor^(k - 1), at most max_s, times a random factor in [1 - jitter, 1]."""

    attempts: int = 4
    """In a row without anything new; then the call has failed."""
    base_s: float = 0.25
    factor: float = 2.0
    max_s: float = 30.0
    jitter: float = 0.5

    def pause_s(self, failures: int, random_01: float) -> float:
        """The pause after `failures` >= 1 attempts in a row that brought nothing new."""
        return min(self.max_s, self.base_s * self.factor ** (failures - 1)) * (1 - self.jitter * random_01)


@dataclass(frozen=True)
class Timeouts:
    heartbeat_s: float = 30.0
    """An attempt that is silent for longer is lost. Functions send a line at least every 5 s."""
    start_s: float = 900.0
    """How long an attempt may wait for a replica and its `started`."""


class Invoker:
    """Calls functions of one platform. `seed` fixes the jitter of the pauses; `note` hears of every retry, `ended` of
    every attempt's end. `probe` raises Away while the orchestrator itself cannot reach what functions need."""

    def __init__(
        self, platform: Platform, *, retry: RetryPolicy = RetryPolicy(), timeouts: Timeouts = Timeouts(),
        seed: int = 0, note: Callable[[str], None] = lambda _message: None, tracing: Tracing | None = None,
        ended: Ended = lambda _function, _outcome, _observation: None, outages: Outages | None = None,
        probe: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:  # fmt: skip
        self.platform, self.retry, self.timeouts, self.seed, self.note = platform, retry, timeouts, seed, note
        self.tracing = tracing or Tracing()
        self.ended = ended
        self.outages, self.probe = outages or Outages(seed=seed), probe

    async def invoke(
        self, function: str, call: Call, *, observe: Callable[[CallObservation], None] = lambda _observation: None,
        within: Span | None = None, idle: Idle = nullcontext,
    ) -> AsyncGenerator[Event, None]:  # fmt: skip
        """The call's events: `samples` and `cut` once each, `done` last; `started`, `progress` as attempts send them.

        `observe` gets the measures of the attempt that brought `done`. Raises CallFailed for a fatal error and for one
        attempt too many, ValueLost for an input that is gone, RunError for an outage without end; PlatformError as the
        platform does. Closing the iterator cancels the call.
        """
        dice = self.dice(call)
        seen: set[Ref] = set()
        failures = 0
        async with self.outages.waiting() as wait:
            while True:
                known = len(seen)
                try:
                    async with aclosing(self.attempt(function, call, observe=observe, within=within)) as events:
                        async for event in events:
                            if event.kind in ("samples", "cut") and event.ref is not None:
                                if event.ref in seen:
                                    continue
                                seen.add(event.ref)
                            if event.kind in ("samples", "cut", "done"):
                                await wait.over()
                            yield event
                    return
                except Away as away:
                    async with idle():
                        await wait.until(away, self.probe)
                except CallLost as error:
                    failures = 1 if len(seen) > known else failures + 1
                    await self.pause(function, call, failures, str(error), dice)

    async def attempt(
        self, function: str, call: Call, *, observe: Callable[[CallObservation], None] = lambda _observation: None,
        within: Span | None = None,
    ) -> AsyncGenerator[Event, None]:  # fmt: skip
        """The events of one attempt; `done` is the last. Raises CallLost where another may succeed, Away where it may
        once something is back, ValueLost for an input that is gone, else CallFailed."""
        attempt, span = _Attempt(function, call), self.tracing.attempt(function, call, within)
        try:
            async with aclosing(self._events(function, span.call)) as events:
                async for event in events:
                    attempt.note(event)
                    if event.kind == "progress" and attempt.account is not None:
                        span.reported(attempt.account)
                    if event.kind == "error":
                        break
                    if event.kind == "done":
                        span.end(attempt.replica, attributes={"rlhf.cold": attempt.cold, **attempt.place})
                        observation = attempt.observation(event)
                        self.ended(function, "done", observation)
                        observe(observation)
                    yield event
                    if event.kind == "done":
                        return
            reason = str(attempt.error.get("message", "no message"))
            if made_in_a_step(lost := str(attempt.error.get("lost", ""))) or on_a_node(lost):
                raise ValueLost(lost, f"{function}, call {call.id}: {reason}")
            if attempt.error.get("kind") == "fatal":
                raise CallFailed(f"{function}, call {call.id}: {reason}")
            if "away" in attempt.error:
                raise Away(str(attempt.error["away"]), f"{function}, call {call.id}: {reason}")
            raise CallLost(reason)
        except (Away, CallFailed, CallLost, ValueLost) as error:
            span.end(attempt.replica, str(error))
            self.ended(function, "failed" if isinstance(error, CallFailed) else "lost", None)
            raise
        finally:
            span.end(attempt.replica, "cancelled")  # unless it has ended

    def dice(self, call: Call) -> random.Random:
        """The jitter of the call's pauses."""
        return random.Random(f"{self.seed}/{call.id}")

    async def pause(self, function: str, call: Call, failures: int, reason: str, dice: random.Random) -> None:
        """Waits after `failures` attempts in a row that brought nothing new; CallFailed where none is left."""
        if failures >= self.retry.attempts:
            raise CallFailed(f"{function}, call {call.id}: failed {failures} times, at last: {reason}")
        pause_s = self.retry.pause_s(failures, dice.random())
        self.note(f"{function}, call {call.id}: tried again in {pause_s:.1f} s: {reason}")
        await asyncio.sleep(pause_s)

    async def _events(self, function: str, call: Call) -> AsyncGenerator[Event, None]:
        """The events of one attempt. Raises CallLost also when it stays silent for too long."""
        async with aclosing(_closable(self.platform.call(function, call))) as events:
            limit_s = self.timeouts.start_s
            while True:
                try:
                    async with asyncio.timeout(limit_s):
                        event = await anext(events)
                except StopAsyncIteration:
                    raise CallLost(f"the answer to call {call.id} ended without `done` or `error`") from None
                except TimeoutError:
                    raise CallLost(f"call {call.id} has been silent for {limit_s:g} s") from None
                limit_s = self.timeouts.heartbeat_s
                yield event
                if event.kind in ("done", "error"):
                    return


class _Attempt:
    """What an attempt tells about itself as it goes by."""

    def __init__(self, function: str, call: Call) -> None:
        self.function, self.call = function, call
        self.asked_s = self.started_s = now_s()
        self.replica, self.cold = "", False
        self.place: dict[str, str | bool] = {}
        """Of a replica's first call on a cluster with node agents: its node, and whether it has to fetch its state."""
        self.prompt_tokens = self.response_tokens = self.samples = 0
        self.error: dict[str, object] = {}
        self.account: Told | None = None
        self.account_s = 0.0

    def note(self, event: Event) -> None:
        data = event.data
        if event.kind == "started":
            self.started_s = now_s()
            self.replica, self.cold = str(data.get("replica", "")), data.get("calls") == 0
            if "node" in data:
                self.place = {"k8s.node.name": data["node"], "rlhf.strange": data["strange"]}
        elif event.kind == "progress" and "meter" in data:
            self.account, self.account_s = Told.from_json(data["meter"]), now_s()
        elif event.kind == "error":
            self.error = dict(data)
        elif event.kind in ("samples", "cut") and "length" in data:
            self.prompt_tokens += sum(data["prompt_length"])
            self.response_tokens += sum(data["length"])
            self.samples += len(data["length"])

    def observation(self, done: Event) -> CallObservation:
        counts = {**done.data, **done.data.get("stats", {})}  # train keeps its counts beside its metrics
        stats = {k: float(v) for k, v in counts.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        if self.place:
            stats["strange"] = float(self.place["rlhf.strange"])
        if self.account is not None:
            stats |= {"bytes_in": float(self.account.bytes_in), "bytes_out": float(self.account.bytes_out)}
        return CallObservation(
            function=self.function,
            replica=self.replica,
            operation=self.call.operation,
            cold=self.cold,
            start_s=self.started_s - self.asked_s,
            work_s=now_s() - self.started_s,
            prompt_tokens=self.prompt_tokens,
            response_tokens=self.response_tokens,
            samples=self.samples,
            stop_s=now_s(),
            stats=stats,
            phases=self.phases(),
            profile=done.data.get("profile"),
        )

    def phases(self) -> list[tuple[str, float, float]]:
        """As the replica reported, its last moment laid where that came: its clock is not ours."""
        if self.account is None:
            return []
        zero_s = self.account_s - (self.account.spans[0].stop_s or 0.0)
        return [(s.name, zero_s + s.start_s, zero_s + (s.stop_s or 0.0)) for s in self.account.spans[1:]]


async def ask_cut(store: AsyncExchange, call: Call) -> None:
    """Asks the function that works on `call`, wherever it is, to hand over its unfinished samples and end."""
    await store.put(call.cut_key, b"cut", lifetime_s=CUT_LIFETIME_S)


def _closable(events: AsyncIterator[Event]) -> AsyncGenerator[Event, None]:
    """Platform.call is an async generator on every platform; the protocol's AsyncIterator does not say so."""
    return cast(AsyncGenerator[Event, None], events)
