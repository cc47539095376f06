"""What a call of the environment says of samples: with their answers appended, their columns, their conversations."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from functions.base.samples import Columns, Finish, Ragged, SampleBatch, unrouted
from functions.base.wire import Json
from functions.environment.base import Answer
from functions.environment.episode import Outcome, Turn
from functions.environment.kinds import Kind, role
from functions.exchange.base import Exchange

_ANCHORS = 1 << 24
"""float32 holds whole numbers below this."""


@dataclass(frozen=True)
class Item:
    """A sample whose turn has ended."""

    row: int
    """In the call's batch."""
    turn: Turn
    kind: Kind
    given: Callable[[Answer], list[int]]
    """The tokens that an answer is."""
    tokenizer: Tokenizer
    exchange: Exchange

    @property
    def opens(self) -> bool:
        """What is asked for is its prompt."""
        return self.turn.said[-1] is None


def spans_of(turns: Ragged, i: int) -> list[tuple[int, int]]:
    """Where each turn of a sample lies in its response; `turns` of SampleBatch."""
    found = []
    for number in range(int(turns[i].max(initial=-1)) + 1):
        at = np.flatnonzero(turns[i] == number)
        found.append((int(at[0]), int(at[-1]) + 1))
    return found


def answered(batch: SampleBatch, part: Sequence[tuple[Item, Outcome]]) -> SampleBatch:
    """The samples with what was answered: appended at mask 0, where they go on; what a harness asked first is their
    prompt."""
    before = batch.select([item.row for item, _ in part])
    goes_on = [outcome.finish == Finish.UNFINISHED and (not item.opens or item.kind.asks) for item, outcome in part]
    given = [item.given(outcome.answer) if on else [] for on, (item, outcome) in zip(goes_on, part, strict=True)]
    opened = [on and item.opens for on, (item, _) in zip(goes_on, part, strict=True)]
    if any(opened):
        prompts = [
            new if opens else before.prompts[row].tolist()
            for opens, new, row in zip(opened, given, before.prompt.tolist(), strict=True)
        ]
        before = dataclasses.replace(
            before, prompts=Ragged.from_rows(prompts, np.int32), prompt=np.arange(len(part), dtype=np.int32)
        )
        given = [[] if opens else new for opens, new in zip(opened, given, strict=True)]

    def extended(flat: Any, fill: Sequence[Sequence[float]], dtype: Any) -> Any:
        rows = Ragged(flat, before.responses.lengths).rows()
        return Ragged.from_rows(
            [np.concatenate((row, np.asarray(new, dtype))) for row, new in zip(rows, fill, strict=True)], dtype
        )

    zeros, experts = [[0.0] * len(new) for new in given], before.experts
    if experts is not None:
        parts = zip(Ragged(experts, before.responses.lengths).rows(), given, strict=True)
        experts = np.concatenate([part for row, new in parts for part in (row, unrouted(row, len(new)))])
    return dataclasses.replace(
        before,
        responses=extended(before.responses.flat, given, np.int32),
        logprobs=extended(before.logprobs, zeros, np.float32).flat,
        mask=extended(before.mask, zeros, np.float32).flat,
        finish=np.array([int(outcome.finish) for _, outcome in part], np.int32),
        experts=experts,
    )


def columns_of(samples: SampleBatch, said: Sequence[Sequence[Answer]], outcomes: Sequence[Outcome]) -> Columns:
    """Of samples "score", of tokens "turn_rewards" and "anchor"."""
    earned = [[answer.reward or 0.0 for answer in answers] for answers in said]
    total = [
        sum(turns) if outcome.score is None else outcome.score for turns, outcome in zip(earned, outcomes, strict=True)
    ]
    turns = samples.turns
    rewards, anchors = np.zeros(len(samples.mask), np.float32), np.zeros(len(samples.mask), np.float32)
    for i, start in enumerate(samples.responses.offsets[:-1]):
        asked = ""
        for (begin, stop), answer, reward in zip(spans_of(turns, i), said[i], earned[i], strict=True):
            rewards[start + stop - 1] = reward
            anchors[start + begin] = xxhash.xxh3_64_intdigest(asked.encode()) % _ANCHORS
            asked = json.dumps([list(o) for o in answer.observations])
    return Columns.of(
        samples, sample={"score": np.array(total, np.float32)}, token={"turn_rewards": rewards, "anchor": anchors}
    )


def pieces_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text; a letter of several tokens is its last one's."""
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token) or "" for token in tokens]


def line_of(
    samples: SampleBatch, i: int, item: Item, outcome: Outcome, said: Sequence[Answer], score: float | None,
    spans: Sequence[tuple[int, int]],
) -> bytes:  # fmt: skip
    conversation: list[Json] = []
    turns = [turn for turn in item.turn.said if turn is not None]
    for turn, answer, (begin, _) in zip(turns, said, spans, strict=True):
        own = {"role": "assistant", "content": turn.text, "tokens": len(turn.tokens), "reward": answer.reward}
        own |= {"begin": begin, "pieces": pieces_of(item.tokenizer, turn.tokens)}
        own |= {"errors": dict(answer.errors)} if answer.errors else {}
        told = [
            {"role": name, "content": text}
            if answer.asked
            else {"role": role(item.kind), "name": name, "content": text}
            for name, text in answer.observations
        ]
        conversation += [own, *({**message, "seconds": answer.seconds} for message in told)]
    tokenizer, error = item.tokenizer, outcome.answer.failed
    line = {
        "group": int(samples.group[i]),
        "index": int(samples.index[i]),
        "prompt": tokenizer.decode(samples.prompts[int(samples.prompt[i])].tolist(), skip_special_tokens=False),
        "response": tokenizer.decode(samples.responses[i].tolist(), skip_special_tokens=False),
        "score": score,
        **({"error": error} if error is not None else {}),
        "finish": outcome.finish.name.lower(),
        "version": int(samples.version[i]),
        "tokens": int(samples.responses.lengths[i]),
        "conversation": conversation,
    }
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"
