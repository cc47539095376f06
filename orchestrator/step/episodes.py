"""A generation whose samples have turns.

    shards --> generate slots --a turn has ended--> environment slots --answered--> generate slots, at mask 0
                                                         |
                                                         +--the episode is over--> whoever follows

Nobody waits for all: a replica that generates takes what is answered by then, and goes where nothing is for long
(slots.py). What is answered while all that there are work waits for one of them, until its waiting has cost as much as
a cut of that call would: then the call is cut, and goes on with both. (At most twice the cost of knowing beforehand:
Dooly, Goldman, Scott, "On-line analysis of the TCP acknowledgment delay problem", JACM 2001.)
A turn is a cut: keys and values of samples that are long enough for it go along (StepPlan.resume), others are computed
again.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from functions.base.samples import Finish
from functions.base.wire import Call, Event, Json, Ref
from orchestrator.base.clock import now_s
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.calls.fleet import Stage
from orchestrator.calls.invoke import ask_cut
from orchestrator.planner.base import StepPlan, Waits
from orchestrator.planner.episodes import EARLY, ended_within, stays_s, thinned
from orchestrator.step.dataflow import Finished, Samples
from orchestrator.step.rollout import Shard
from orchestrator.step.slots import Slots

Key = tuple[int, int]
SOON_S = 1e-3
"""What is due by then is due: clocks and timers are no finer."""
CALL_S = 0.02
"""Of a call of the environment, for each of its samples at most."""


@dataclass(eq=False)
class _Running:
    """An open call."""

    call: Call
    tokens: dict[Key, int]
    """That its unfinished samples held when it began; of a call of the environment 0."""
    cut: bool = False

    def cut_s(self, plan: StepPlan) -> float:
        """Seconds of all its samples that a cut takes."""
        assert plan.resume is not None, "the caller has looked"
        return len(self.tokens) * (plan.resume.call_s + plan.resume.token_s * sum(self.tokens.values()))


@dataclass
class Episodes:
    """`generate_call` and `act_call` make the calls for samples that are to go on, and for those to be answered."""

    generate_call: Callable[[Shard], Call]
    act_call: Callable[[Sequence[Ref]], Call]
    store: AsyncExchange
    caches: str
    """Prefix of the keys and values that its calls hand over."""
    unfinished: int
    concurrency: int
    """Episodes that one replica of the environment serves at a time."""
    plan: StepPlan
    prompts: Mapping[int, tuple[int, str]]
    """Of each group: its prompt's tokens, and the environment that answers it."""
    scaled: asyncio.Event
    """Set when one replica of generate has room for all that are left, so that no more are asked for and it stays, and
    they may be finished by the time that training could have caught up (EARLY, planner/episodes.py)."""
    finished: list[Finished] = field(default_factory=list)
    said: Counter[str] = field(default_factory=Counter)
    """turns, tool_calls, tool_errors, failed of the samples that are over, and how often they ended how."""
    texts: list[Ref] = field(default_factory=list)
    failed: list[Json] = field(default_factory=list)
    let_go: int = 0
    let_go_s: float = 0.0
    """Replica-seconds of generate that were not held."""
    _caches: dict[Key, list[Ref]] = field(default_factory=dict)
    _shards: Sequence[Finished] = ()
    _running: list[_Running] = field(default_factory=list)
    _asking: list[_Running] = field(default_factory=list)
    """Calls of the environment."""
    _asked_s: dict[Key, float] = field(default_factory=dict)
    """Since when samples wait for their answer."""
    _answered_s: dict[Key, list[float]] = field(default_factory=dict)

    @property
    def response_tokens(self) -> int:
        return sum(sum(item.length) for item in self.finished)

    async def run(
        self, generate: Stage, environment: Stage, shards: Sequence[Finished], samples: Samples, *, ask: bool = False
    ) -> None:
        """All to their end; `shards`: one for each replica to begin with. `ask`: environments make the prompts."""
        self._shards = shards
        most = -(-self.unfinished // max(1, generate.replicas))

        def part(ready: list[Finished], limit: int) -> list[Finished]:
            taken = [ready.pop(0)]
            while ready and sum(len(item.group) for item in taken) + len(ready[0].group) <= limit:
                taken.append(ready.pop(0))
            return taken

        async def turn(items: Sequence[Finished]) -> None:
            caches = [ref for item in items for key in item.keys for ref in self._caches.pop(key, ())]
            call = self.generate_call(Shard([item.ref for item in items], caches))
            tokens = {k: self.prompts[k[0]][0] + n for i in items for k, n in zip(i.keys, i.length, strict=True)}
            running = _Running(call, tokens)
            self._running.append(running)
            try:
                async for event in generate.call(call):
                    if event.kind in ("samples", "cut") and event.ref is not None:
                        item = self._note(event)
                        for key in item.keys:
                            running.tokens.pop(key, None)
                        if event.kind == "samples":
                            self._asked_s |= dict.fromkeys(item.keys, now_s())
                        (acting if event.kind == "samples" else generating).put(item)
            finally:
                self._running.remove(running)

        async def act(items: Sequence[Finished]) -> None:
            asking = _Running(self.act_call([item.ref for item in items]), {k: 0 for i in items for k in i.keys})
            self._asking.append(asking)
            try:
                await answers(asking)
            finally:
                self._asking.remove(asking)

        async def answers(asking: _Running) -> None:
            async for event in environment.call(asking.call):
                if event.kind == "cut":
                    acting.ready.insert(0, Finished.of(event))
                if event.kind != "samples":
                    continue
                item = Finished.of(event)
                for key in item.keys:
                    asking.tokens.pop(key, None)
                acting.changed.set()
                for key in item.keys:
                    if key in self._asked_s:
                        self._answered_s.setdefault(key, []).append(now_s() - self._asked_s.pop(key))
                if event.data["finish"][0] == Finish.UNFINISHED:
                    generating.put(item)
                else:
                    self._over(item, event, samples)
            if self.plan.resume is not None and self.unfinished <= most and self._ends_soon():
                self.scaled.set()
            if not self.unfinished:
                generating.end()
                acting.end()

        def joins() -> bool:
            """Whether the calls that are open have room for all that is not."""
            at_work = sum(len(running.tokens) for running in self._running)
            ready = sum(len(item.group) for item in generating.ready)
            return self.plan.resume is not None and at_work + ready <= most * len(self._running)

        generating = Slots(
            generate, generate.replicas, lambda ready: part(ready, most), turn,
            stays_s=lambda start_s: self._stays_s(start_s, generating.held), joins=joins,
        )  # fmt: skip
        acting = Slots(environment, environment.replicas, lambda ready: part(ready, self.concurrency), act)
        for shard in shards:
            (acting if ask else generating).put(shard)
        if not shards:
            generating.end()
            acting.end()
        joining = [asyncio.create_task(self._join(generating))]
        if environment.replicas == 1:
            joining.append(asyncio.create_task(self._join_asked(acting)))
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(generating.run())
                both.create_task(acting.run())
        finally:
            for task in joining:
                task.cancel()
        self.let_go, self.let_go_s = generating.let_go, generating.let_go_s

    async def _join(self, generating: Slots[Finished]) -> None:
        """Cuts calls for samples that wait beside them."""
        waited_s, since_s, count = 0.0, now_s(), 0
        while True:
            waited_s += count * (now_s() - since_s)
            since_s, count = now_s(), sum(len(item.group) for item in generating.ready)
            open_ = [running for running in self._running if not running.cut]
            due_s: float | None = None
            if not count:
                waited_s = 0.0
            elif self.plan.resume is not None and open_:
                lightest = min(open_, key=lambda running: running.cut_s(self.plan))
                due_s = (lightest.cut_s(self.plan) - waited_s) / count
                if due_s < SOON_S:
                    waited_s, lightest.cut = 0.0, True
                    await ask_cut(self.store, lightest.call)
                    continue
            generating.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due_s):
                    await generating.changed.wait()

    async def _join_asked(self, acting: Slots[Finished]) -> None:
        """The same for the one replica of the environment, which goes on with what it was asked: tools overlap."""
        while True:
            acting.changed.clear()
            count = sum(len(item.group) for item in acting.ready)
            for asking in [asking for asking in self._asking if count and not asking.cut]:
                unanswered = len(asking.tokens)
                if unanswered < self.concurrency:
                    await asyncio.sleep(CALL_S * (count + unanswered) / count)
                    if acting.ready and asking in self._asking:
                        asking.cut = True
                        await ask_cut(self.store, asking.call)
            await acting.changed.wait()

    def _ends_soon(self) -> bool:
        waited = {key: sum(self._answered_s.get(key, ())) for item in self._shards for key in item.keys}
        for item in self.finished:
            for key in item.keys:
                del waited[key]
        for key, asked_s in self._asked_s.items():
            waited[key] += now_s() - asked_s
        left = [(self.prompts[key[0]][1], already) for key, already in waited.items()]
        return ended_within(self.plan.catch_up_s, left, self.plan.waits) >= EARLY

    def _stays_s(self, start_s: float, held: int) -> float | None:
        """How long one of `held` replicas of generate stays for answers. The last stays to the end where training may
        begin before it, in its room: who trains would wait for samples that wait for room."""
        if held == 1 and self.plan.stream_s:
            return None
        waiting: dict[str, list[float]] = {}
        for (group, _), asked_s in self._asked_s.items():
            waiting.setdefault(self.prompts[group][1], []).append(now_s() - asked_s)
        return stays_s(waiting, self.plan.waits, start_s)

    @property
    def waits(self) -> dict[str, Waits]:
        """What the episodes did, by environment."""
        found: dict[str, list[list[float]]] = {}
        for item in self.finished:
            for key in item.keys:
                found.setdefault(self.prompts[key[0]][1], []).append(self._answered_s.get(key, []))
        return {
            name: Waits(
                thinned([len(each) for each in every]), thinned([s for each in every for s in each[:-1]]),
                thinned([sum(each[:-1]) for each in every]),
            )
            for name, every in found.items()
        }  # fmt: skip

    def _note(self, event: Event) -> Finished:
        """Keeps where the samples' keys and values are."""
        item = Finished.of(event)
        for key, refs in zip(item.keys, event.data.get("caches", ()), strict=False):
            self._caches[key] = [Ref.from_json(ref) for ref in refs]
        return item

    def _over(self, item: Finished, event: Event, samples: Samples) -> None:
        data = event.data
        self.unfinished -= len(item.group)
        self.finished.append(item)
        for name in ("turns", "tool_calls", "tool_errors"):
            self.said[name] += sum(data[name])
        self.said.update(f"finish/{Finish(finish).name.lower()}" for finish in data["finish"])
        self.said["failed"] += len(data["failed"])
        self.failed += data["failed"]
        if "texts" in data:
            self.texts.append(Ref.from_json(data["texts"]))
        for key in item.keys:
            self._caches.pop(key, None)
        columns = Ref.from_json(data["columns"]) if "columns" in data else None
        samples.environment.put(Event("done", columns, {"group": list(item.group), "failed": data["failed"]}))
        samples.put(item)

    def metrics(self) -> dict[str, float]:
        """environment/*, over the samples; and rollout/replicas_let_go."""
        count = max(1, sum(len(item.group) for item in self.finished))
        shares = {f"environment/{name}": number / count for name, number in sorted(self.said.items())}
        return shares | {"rollout/replicas_let_go": float(self.let_go), "rollout/let_go_s": self.let_go_s}

    async def free(self) -> None:
        """Deletes the keys and values that were handed over."""
        await self.store.delete(self.caches)
