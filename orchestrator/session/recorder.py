"""What a run leaves for people: metrics, cost, trace, samples, events, and the view of it while it goes on.

Everything here is derived from the journal and the platform's books: a recorder brings the files in line with the
journal when it opens, and never decides anything.
"""

import asyncio
import json
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from functions.base.samples import Columns, Ragged
from functions.base.wire import Json, Ref
from orchestrator.base.background import Retried, guarded, in_one_line, stopped
from orchestrator.base.errors import RunError
from orchestrator.base.files import write_atomically
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.calls.fleet import Fleet
from orchestrator.job.config import JobConfig
from orchestrator.planner.base import CallObservation, StepPlan
from orchestrator.platforms.base import FunctionSpec, Platform, Replica
from orchestrator.run.directory import PROFILE
from orchestrator.run.events import EventLog
from orchestrator.run.journal import Record
from orchestrator.run.ledger import Books, Cost, Ledger, total
from orchestrator.session.loop import ACCURACY_GIVEN, StepResult
from orchestrator.session.view import Snapshot, View, time_left_s
from orchestrator.step.dataflow import StepReport
from orchestrator.telemetry.headline import HEADLINES, headline
from orchestrator.telemetry.job_metrics import JobMetrics
from orchestrator.telemetry.now import Now
from orchestrator.telemetry.open_sinks import open_sinks
from orchestrator.telemetry.plans import Plans
from orchestrator.telemetry.trace import JOB, Trace, TraceSpan
from orchestrator.telemetry.validation import PREFIX as VALIDATION
from orchestrator.telemetry.validation import validation_names

VIEW_EVERY_S = 0.25
BOOKS_EVERY_S = 10.0
"""A killed execution loses at most so much of its spending from the books."""
FOLLOWED = ("response_length/mean", "dpo/accuracy", "rm/accuracy", "actor/ppo_kl", "actor/skipped_updates",
            "actor/grad_norm", "perf/throughput", "rollout/tokens_per_s", "timing_s/step")  # fmt: skip
"""What a `step` event tells of the step's metrics, after its headline; metrics.jsonl has them all."""
FIRST_FAILURES = 8
NOTE_S = 60.0
"""A note stays in view for so long, unless another comes."""
ROOM_S = 5.0
"""A replica that has had no room for so long is told of."""

log = logging.getLogger(__name__)


class Recorder:
    """Opened for one execution of a job, when its journal is read and its platform made."""

    def __init__(
        self, job: JobConfig, path: Path, store: AsyncExchange, records: Sequence[Record], platform: Platform,
        specs: Sequence[FunctionSpec], view: View, events: EventLog, waiting: Callable[[], str] = str,
    ) -> None:  # fmt: skip
        self._job, self._path, self._store, self._records = job, path, store, records
        self._platform, self._specs, self._view, self._events = platform, specs, view, events
        self._waiting = waiting
        """What the job waits for at this moment, in one line."""
        self._begun_s = asyncio.get_running_loop().time()
        self._fleet: Fleet | None = None
        self._unwritten: list[str] = []
        """Notes that events.jsonl could not take yet."""
        self._noted, self._noted_s = "", 0.0
        self._retried = Retried(self.note)
        committed = [(record.step, metrics_of(record)) for record in records]
        self._sinks = open_sinks(job, path, committed, self.note)
        self._ledger = Ledger(path / "cost.json", specs, next_step=len(records), now_s=self._begun_s)
        self._curves = _Curves()
        for _, metrics in committed:
            self._curves.add(metrics)
        self._trace = Trace(path / "trace.json", now_s=self._begun_s, unix_s=time.time())
        self._now = Now(path, self._trace.job_s)
        self._plans = Plans(path)
        self.counts = JobMetrics(path)
        events.append("started", {"execution": events.executions + 1, "step": len(records) - 1, "steps": job.steps})
        for record in records:
            self._tell(record)

    def planned(self, step: int, plan: StepPlan) -> None:
        """What a step is about to do."""
        self._plans.write(step, plan)

    def books(self) -> Books:
        """The job's cost until now, as written to cost.json."""
        books = self._ledger.update(self._platform.usage(), asyncio.get_running_loop().time())
        self.counts.write(books)
        return books

    def cost(self) -> Cost:
        """Of the job until now."""
        return total(self._ledger.count(self._platform.usage(), asyncio.get_running_loop().time()).functions)

    async def keep(self, number: int, report: StepReport) -> None:
        """Writes samples/NNNNNN.jsonl: the first of the step's scored samples, in the order (group, index);
        samples/validation-NNNNNN.jsonl, those of the validation after it; and the traces of a step that is profiled."""
        kept = await self._texts(report.texts)
        if kept and report.mismatch is not None:
            found = Columns.decode(await self._store.get(report.mismatch))
            for name in found.sample:
                said = dict(zip(found.keys, found.sample[name].tolist(), strict=True))
                for text in kept:
                    text[name] = said.get((text["group"], text["index"]))  # None: it did not train
            tokens = dict(zip(found.keys, Ragged(found.token["difference"], found.lengths).rows(), strict=True))
            for text in kept:
                off = tokens.get((text["group"], text["index"]))
                for turn in text.get("conversation", ()):
                    if off is not None and len(off) and "begin" in turn:
                        own = off[turn["begin"] : turn["begin"] + turn["tokens"]].tolist()
                        turn["difference"] = [None if math.isnan(value) else round(value, 6) for value in own]
        self._write_texts(f"{number:06d}", kept)
        self._write_texts(f"validation-{number:06d}", await self._texts(report.validation_texts))
        counts = Counter[str]()
        for call in report.calls:
            if call.profile is not None:
                counts[call.function] += 1
                file = self._path / PROFILE / f"{number:06d}" / f"{call.function}-{counts[call.function]}.json.gz"
                write_atomically(file, await self._store.get(Ref.from_json(call.profile)))

    async def _texts(self, refs: Sequence[Ref]) -> list[Json]:
        texts = [json.loads(line) for ref in refs for line in (await self._store.get(ref)).splitlines()]
        return sorted(texts, key=lambda text: (text["group"], text["index"]))[: self._job.telemetry.samples]

    def _write_texts(self, name: str, kept: Sequence[Json]) -> None:
        if kept:
            lines = "".join(json.dumps(text, ensure_ascii=False) + "\n" for text in kept)
            write_atomically(self._path / "samples" / f"{name}.jsonl", lines.encode())

    def committed(self, result: StepResult) -> None:
        """A step is in the journal: metrics, cost and trace follow it."""
        now_s, usage = asyncio.get_running_loop().time(), self._platform.usage()
        step = result.record.step
        self._tell(result.record)
        if failed := result.report.failed:
            self._events.tell("sample_failures", step, {"count": len(failed), "first": failed[:FIRST_FAILURES]})
        cost = self._ledger.close_step(step, usage, now_s)
        metrics = metrics_of(result.record)
        self._curves.add(metrics)
        self.counts.committed(metrics, cost.usd)
        self._retried.attempt("counts", lambda: self.counts.write(self._ledger.books))
        for sink in self._sinks:
            sink.write(step, metrics)
        name = f"step {step}"
        lengths = [result.report.lengths[group] for group in sorted(result.report.lengths)]
        waits = {name: asdict(seen) for name, seen in result.report.waits.items()}
        said = {"lengths": lengths} | ({"waits": waits} if waits else {})
        spans = [TraceSpan(JOB, "step", name, result.start_s, result.stop_s, said)]
        spans += [TraceSpan(JOB, stage.name, name, stage.start_s, stage.stop_s) for stage in result.report.stages]
        spans += [call_span(call) for call in result.report.calls]
        self._trace.write(spans, usage, now_s)
        self._now.look(self._platform.replicas(), now_s)
        self._now.committed()
        self._retried.attempt("view", lambda: self._view.committed(self.snapshot()))

    def note(self, message: str) -> None:
        """One line worth knowing: a retry, something that was given up. Into the view, the events and the log.

        Never fails: what events.jsonl cannot take now, it gets later.
        """
        self._noted, self._noted_s = message, asyncio.get_running_loop().time()
        self._unwritten.append(message)
        self._write_notes()
        if self._unwritten:
            log.warning("%s", message)
        if self._fleet is not None:
            with suppress(Exception):  # the watch, which shows it again, tells what the view fails with
                self._view.changed(self.snapshot())

    def _write_notes(self) -> None:
        while self._unwritten:
            try:
                self._events.append("note", {"message": self._unwritten[0]})
            except RunError:
                return
            self._unwritten.pop(0)

    def _tell(self, record: Record) -> None:
        if self._job.exchange.url is not None:  # else the journal itself lies there
            write_atomically(self._path / record.key, record.encode())
        metrics = metrics_of(record)
        if validation := {name: value for name, value in metrics.items() if name.startswith(VALIDATION)}:
            self._events.tell("validation", record.step, {"metrics": validation})
        followed = {name: metrics[name] for name in (headline(metrics), *FOLLOWED) if name in metrics}
        cost_usd, versions = record.observed["cost_usd"], record.pointers["versions"]
        self._events.tell("step", record.step, {"metrics": followed, "cost_usd": cost_usd, "versions": versions})

    @asynccontextmanager
    async def watching(self, fleet: Fleet) -> AsyncIterator[None]:
        """Shows the job while it runs; at the end the files are closed with what was spent until then."""
        self._fleet, failed = fleet, True
        watch = guarded("the watch over the job", self._watch, self.note)
        try:
            yield
            failed = False
        finally:
            try:
                await stopped(watch)
            finally:
                self._close(failed)

    def _close(self, failed: bool) -> None:
        """What cannot be written or closed is noted, each for itself: it keeps no other from its end, and a job that is
        done from none of its."""
        now_s, usage = asyncio.get_running_loop().time(), self._platform.usage()
        self._end("cost", lambda: self._ledger.update(usage, now_s))
        self._end("counts", lambda: self.counts.write(self._ledger.books))
        self._end("trace", lambda: self._trace.write([], usage, now_s))
        self._now.look(self._platform.replicas(), now_s)
        self._now.committed()
        self._end("now", lambda: self._write_now(now_s))
        for sink in self._sinks:
            self._end("metrics", partial(sink.close, failed=failed))
        self._end("trace", self._trace.close)
        self._end("plans", self._plans.close)
        self._write_notes()
        self._end("view", self._view.close)

    def _write_now(self, now_s: float) -> None:
        self._now.write(len(self._records), self._ledger.books, now_s, self._ledger.wall_s(now_s))

    def _end(self, name: str, action: Callable[[], object]) -> None:
        """One of the things to do at the end, of which none waits for another."""
        try:
            action()
        except Exception as error:
            log.debug("%s", name, exc_info=error)
            self.note(f"{name}: at the end: {in_one_line(error)}")

    async def _watch(self) -> None:
        """Endless. What cannot be written now, is when it can."""
        shown: Json = {}
        crowded = False
        clock, attempt = asyncio.get_running_loop().time, self._retried.attempt
        written_s = clock()
        while True:
            if clock() >= written_s + BOOKS_EVERY_S:
                attempt("books", self.books)
                written_s = clock()
            self._now.look(self._platform.replicas(), clock())
            attempt("now", lambda: self._write_now(clock()))
            snapshot = self.snapshot()
            attempt("view", partial(self._view.changed, snapshot))
            replicas = {name: exist for name, (exist, _) in snapshot.replicas.items()}
            now: Json = {"step": len(self._records), "stages": list(snapshot.stages), "replicas": replicas}
            if now != shown:
                attempt("events", partial(self._events.append, "stage", now))
                shown = now
            if bool(room := no_room(self._platform.replicas(), clock())) != crowded:
                crowded = not crowded
                self.note(room or "there is capacity again")
            self._write_notes()
            await asyncio.sleep(VIEW_EVERY_S)

    def snapshot(self) -> Snapshot:
        """The job now; its cost as of the last look into the books."""
        replicas = self._platform.replicas()
        existing = Counter(replica.function for replica in replicas)
        step, curves, books = max(0, len(self._records) - 1), self._curves, self._ledger.books
        now_s = asyncio.get_running_loop().time()
        return Snapshot(
            job=self._job.name,
            recipe=self._job.recipe,
            step=step,
            steps=self._job.steps,
            elapsed_s=now_s - self._begun_s,
            stages=self._fleet.at_work() if self._fleet is not None else (),
            replicas={spec.name: (existing[spec.name], spec.max_replicas) for spec in self._specs},
            headline=HEADLINES[curves.headline] if curves.headline else "reward",
            headlines=curves.headlines,
            validations=curves.validations,
            validation_name=curves.validation_name,
            tokens_per_s=curves.tokens_per_s,
            cost_usd=books.usd,
            replica_s=total(books.functions).replica_s,
            left_s=time_left_s(step, self._job.steps, curves.step_s),
            note=self._waiting() or no_room(replicas, now_s) or (self._noted if now_s < self._noted_s + NOTE_S else ""),
        )


def no_room(replicas: Sequence[Replica], now_s: float) -> str:
    """`waiting for capacity since 12 s: ...`, of the replica that has waited longest; empty where none does."""
    waiting = [replica for replica in replicas if replica.waits and now_s - replica.since_s >= ROOM_S]
    first = min(waiting, key=lambda replica: replica.since_s, default=None)
    return "" if first is None else f"waiting for capacity since {now_s - first.since_s:.0f} s: {first.waits}"


def call_span(call: CallObservation) -> TraceSpan:
    begun_s = call.stop_s - call.work_s
    return TraceSpan(call.function, call.replica, call.operation, begun_s, call.stop_s, call_args(call), call.phases)


def call_args(call: CallObservation) -> Json:
    """A call in the trace: the function's own counts, the samples that came back, and its cold start if it had one."""
    args: Json = dict(call.stats)
    if call.samples:
        args |= {"samples": call.samples, "prompt_tokens": call.prompt_tokens, "response_tokens": call.response_tokens}
    return args | ({"start_s": call.start_s} if call.cold else {})


@dataclass
class _Curves:
    """What the view follows of the committed steps."""

    headline: str | None = None
    headlines: list[float] = field(default_factory=list)
    validations: list[float] = field(default_factory=list)
    validation_name: str = ""
    tokens_per_s: float | None = None
    step_s: list[float] = field(default_factory=list)
    """Of training steps."""

    def add(self, metrics: Mapping[str, float]) -> None:
        if (name := headline(metrics)) is not None:
            self.headline = name
            self.headlines.append(metrics[name])
            self.step_s.append(metrics["perf/time_per_step"])
            self.tokens_per_s = metrics["perf/total_num_tokens"] / metrics["perf/time_per_step"]
        for name in validation_names(metrics):
            self.validation_name = self.validation_name or name
            if name == self.validation_name:
                self.validations.append(metrics[name])


def metrics_of(record: Record) -> dict[str, float]:
    """A record's metrics: those of learning, and those of the execution that committed it."""
    found: dict[str, float] = {**record.history["metrics"], **record.observed["metrics"]}
    if found.pop(ACCURACY_GIVEN, 1.0):
        return found
    return {name: value for name, value in found.items() if not (name.startswith(VALIDATION) and "/acc/" in name)}
