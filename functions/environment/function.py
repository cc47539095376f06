"""The environment function: operation `act`.

inputs   samples (SampleBatch: each ends with a turn, STOP, was cut off, LENGTH, or has not begun, UNFINISHED: of a
         harness, whose first request becomes its prompt; of any other kind it goes on as it came),
         rows (JSON: {"<group>": row})
weights  policy (for its tokenizer and chat template)
params   ActParams
events   samples   ref SampleBatch of samples that go on (UNFINISHED: the answer's tokens are appended at mask 0), or of
         samples that are over (STOP, LENGTH, TURNS, ENVIRONMENT), as they are answered; data {"group", "index",
         "prompt_length", "length", "finish"}, and of those that are over {"turns", "tool_calls", "tool_errors"} and
         "columns"  with `score`: ref Columns of those that did not fail: of samples "score", of tokens "turn_rewards"
                    (at each turn's last token) and "anchor" (at each turn's first: what it answered, as a number
                    below 2^24; gigpo)
         "failed"   [{"group", "index", "message"}] of those whose environment failed
         "texts"    with `score`: ref of JSON lines, as the reward function's, with the "conversation"
         cut       ref SampleBatch of samples that are not answered yet, where the call is cut: the replica goes on
         asking, a call that brings them again gets the answers; data as of those that go on
done     data {"samples", "tokens", "seconds": of the environments, "tool_calls", "errors": {kind: count}}

An environment that fails (raises in `reset`, `step` or a reward, takes longer than timeout_s, says what is no text or
no finite number) fails the call with one line, or, with on_error = "drop", its sample is listed as failed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import xxhash

from functions.base.samples import Finish, SampleBatch
from functions.base.wire import Call, Event, Json, Version
from functions.call.function import Context, FatalError, ReplicaBroken
from functions.call.inputs import read_samples
from functions.call.params import parse
from functions.environment.base import Answer, Said
from functions.environment.episode import Episodes, Outcome, Turn, play, read, write
from functions.environment.kinds import Kind, open_kind, role
from functions.environment.template import Template
from functions.environment.told import Item, answered, columns_of, line_of, spans_of
from functions.environment.watched import Watched
from functions.weights.manifest import read_manifest

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "config.json",
          "generation_config.json")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ActParams:
    kinds: Mapping[str, Any]
    """Name (a row's `environment`; "" for all rows) to what kinds.py opens."""
    episodes: str
    """Prefix of the generation's records."""
    max_turns: int
    max_response_length: int
    max_prompt_length: int = 1 << 30
    """Of what a harness asks first."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """What the chat template is given beside messages and tools."""
    timeout_s: float = 60.0
    """For each thing that is asked of an environment."""
    concurrency: int = 16
    """Episodes side by side."""
    seed: int = 0
    score: bool = False
    """The environment scores its episodes."""
    on_error: Literal["fail", "drop"] = "fail"

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_response_length", "concurrency"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, wants 1 or more")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s is {self.timeout_s:g}, wants a number of seconds above 0")


class EnvironmentFunction:
    """Keeps kinds, chat templates and episodes between calls."""

    def __init__(self) -> None:
        self._kinds: dict[str, Kind] = {}
        self._templates: dict[Version, Template] = {}
        self._held = Episodes()
        self._watched = Watched(self._work, lambda item: item.turn.keys[-1])

    def call(self, call: Call, context: Context) -> Iterator[Event]:
        if call.operation != "act":
            raise FatalError(f"the environment function has no operation {call.operation!r}; it has: act")
        params = parse(ActParams, call.params, "params of act")
        if "policy" not in call.weights:
            raise FatalError("act wants the version that made the samples as weights.policy, for its chat template")
        prior = [event for event in context.prior if event.kind == "samples"]
        done = {key for event in prior for key in zip(event.data["group"], event.data["index"], strict=True)}
        with context.phase("read"):
            batch = read_samples(call, context.exchange, begun=False)
            rows: dict[str, Json] = {}
            for ref in call.inputs.get("rows", ()):
                rows |= json.loads(context.exchange.get(ref))
        turns = batch.turns
        items = [
            self._item(batch, i, spans_of(turns, i), rows, params, call, context)
            for i, key in enumerate(batch.keys)
            if key not in done
        ]
        self._held.forget(params.episodes)
        counts = _Counts(len(prior))
        with context.phase("act"):
            yield from self._act(items, batch, params, call, context, counts)
        yield Event("done", data={"samples": len(batch), "tokens": int(batch.token_counts.sum()), **counts.data})

    def _act(
        self, items: Sequence[Item], batch: SampleBatch, params: ActParams, call: Call, context: Context,
        counts: _Counts,
    ) -> Iterator[Event]:  # fmt: skip
        def enough() -> bool:
            context.check()
            return context.cut_requested()

        left = {item.row for item in items}
        watched = self._watched.results(items, enough, threads=params.concurrency, limit_s=params.timeout_s)
        for found in watched:
            on, over = list[tuple[Item, Outcome]](), list[tuple[Item, Outcome]]()
            for item, outcome in found:
                if outcome is None:
                    late = f"{item.turn.name}: {item.kind.name} took longer than {params.timeout_s:g} s"
                    outcome = write(context.exchange, item.turn.keys[-1], Outcome.failure(late))
                if outcome.answer.failed is not None and params.on_error == "fail":
                    raise FatalError(outcome.answer.failed)
                counts.add(outcome.answer)
                (on if outcome.finish == Finish.UNFINISHED else over).append((item, outcome))
                left.discard(item.row)
            for part in (on, over):
                if part:
                    yield self._event(part, batch, params, call, context, counts)
        if self._watched.hung:
            raise ReplicaBroken(f"{self._watched.hung} episodes hang in their environment; a new replica goes on")
        if left:
            samples = batch.select(sorted(left))
            yield Event("cut", context.exchange.put(f"{call.prefix}unanswered", samples.encode()), samples.about)

    def _work(self, item: Item, timed: Callable[[], None]) -> Outcome:
        if item.opens and not item.kind.asks:
            return Outcome(Answer(), Finish.UNFINISHED)
        return play(item.turn, item.kind, item.exchange, self._held, timed)

    # --- what is asked -----------------------------------------------------------------------------------------------

    def _item(
        self, batch: SampleBatch, i: int, spans: Sequence[tuple[int, int]], rows: Mapping[str, Json], params: ActParams,
        call: Call, context: Context,
    ) -> Item:  # fmt: skip
        (group, index), response = batch.keys[i], batch.responses[i]
        name = f"sample (group {group}, index {index})"
        if str(group) not in rows:
            raise FatalError(f"the rows of call {call.id} lack group {group}")
        row = rows[str(group)]
        kind = self._kind(row, params, name)
        template = self._template(call.weights["policy"], params, context)
        prompt = batch.prompts[int(batch.prompt[i])]
        digest = xxhash.xxh3_128(prompt.tobytes())
        prefix = f"{params.episodes}g{group}.i{index}/t"
        said: list[Said | None] = [None] if kind.asks or not spans else []
        keys, at, count = [f"{prefix}00"] * len(said), 0, int(batch.responses.offsets[i])
        for number, (begin, stop) in enumerate(spans, start=1):
            digest.update(response[at:stop].tobytes())
            keys.append(f"{prefix}{number:02d}.{digest.hexdigest()[:16]}")
            at = stop
            tokens, before = response[begin:stop].tolist(), [*prompt.tolist(), *response[:begin].tolist()]
            cut_off = number == len(spans) and int(batch.finish[i]) == Finish.LENGTH
            logprobs = batch.logprobs[count + begin : count + stop].tolist()
            said.append(Said(template.text(tokens), tokens, logprobs, before, cut_off))
        room = params.max_response_length - len(response) if spans else params.max_prompt_length + 1

        def given(answer: Answer) -> list[int]:
            return template.given(answer, role(kind))

        def fits(answer: Answer) -> bool:
            return len(given(answer)) < room

        seed = int(xxhash.xxh3_64_intdigest(f"{params.seed}/{group}/{index}".encode()) >> 1)
        return Item(
            i,
            Turn(name, row, seed, said, keys, len(spans) >= params.max_turns, fits),
            kind,
            given,
            template.chat.tokenizer,
            context.exchange,
        )

    def _kind(self, row: Mapping[str, Any], params: ActParams, name: str) -> Kind:
        wanted = "" if "" in params.kinds else str(row.get("environment"))
        if wanted not in params.kinds:
            raise FatalError(f"{name}: its row's environment is {wanted!r}; there are {', '.join(params.kinds)}")
        opened = str(params.kinds[wanted])
        if opened not in self._kinds:
            self._kinds[opened] = open_kind(opened)
        return self._kinds[opened]

    def _template(self, version: Version, params: ActParams, context: Context) -> Template:
        if version not in self._templates:
            files = read_manifest(context.exchange, version).files
            directory = Path(context.scratch) / "tokenizer"
            directory.mkdir(exist_ok=True)
            for name in _FILES:
                (directory / name).unlink(missing_ok=True)
                if name in files:
                    (directory / name).write_bytes(context.exchange.durable.get(files[name]))
            try:
                self._templates = {version: Template(directory, params.template)}
            except ValueError as error:
                raise FatalError(f"model.path: {error}") from error
        return self._templates[version]

    # --- what is said ------------------------------------------------------------------------------------------------

    def _event(
        self, part: Sequence[tuple[Item, Outcome]], batch: SampleBatch, params: ActParams, call: Call,
        context: Context, counts: _Counts,
    ) -> Event:  # fmt: skip
        """Of outcomes that all go on, or are all over."""
        counts.events += 1
        name = f"{call.prefix}answered.{counts.events:04d}"
        samples = answered(batch, part)
        ref = context.exchange.put(name, samples.encode())
        data: Json = {**samples.about}
        if part[0][1].finish == Finish.UNFINISHED:
            return Event("samples", ref, data)
        said = [self._answers(item, outcome, context) for item, outcome in part]
        data |= {"turns": [len(answers) for answers in said]}
        data |= {"tool_calls": [sum(answer.calls for answer in answers) for answers in said]}
        data |= {"tool_errors": [sum(sum(answer.errors.values()) for answer in answers) for answers in said]}
        failed = [i for i, (_, outcome) in enumerate(part) if outcome.answer.failed is not None]
        good = [i for i in range(len(part)) if i not in failed]
        data["failed"] = [
            {"group": int(samples.group[i]), "index": int(samples.index[i]), "message": part[i][1].answer.failed}
            for i in failed
        ]
        if params.score:
            columns = columns_of(samples.select(good), [said[i] for i in good], [part[i][1] for i in good])
            data["columns"] = context.exchange.put(f"{name}.columns", columns.encode()).to_json()
            scores = dict(zip(good, columns.sample["score"].tolist(), strict=True))
            turns = samples.turns
            lines = [
                line_of(samples, i, *part[i], said[i], scores.get(i), spans_of(turns, i)) for i in range(len(part))
            ]
            data["texts"] = context.exchange.put(f"{name}.jsonl", b"".join(lines)).to_json()
        return Event("samples", ref, data)

    def _answers(self, item: Item, outcome: Outcome, context: Context) -> list[Answer]:
        """To all turns of an episode that is over."""
        keys = [key for key, said in zip(item.turn.keys, item.turn.said, strict=True) if said is not None]
        before = [read(context.exchange, key) for key in keys[:-1]]
        answers = [found.answer if found is not None else Answer() for found in before]
        return [*answers, outcome.answer] if keys else []


class _Counts:
    """What `done` tells."""

    def __init__(self, events: int) -> None:
        self.events, self._seconds, self._calls, self._errors = events, 0.0, 0, Counter[str]()

    def add(self, answer: Answer) -> None:
        self._seconds += answer.seconds
        self._calls += answer.calls
        self._errors.update(answer.errors)
        self._errors["failed"] += answer.failed is not None

    @property
    def data(self) -> Json:
        errors = {kind: count for kind, count in sorted(self._errors.items()) if count}
        return {"seconds": round(self._seconds, 6), "tool_calls": self._calls, "errors": errors}
