"""What of a stream's text may be told already, and where stop words and tool calls end it."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from functions.base.openai import tool_calls
from functions.base.samples import Finish
from orchestrator.api.gateway.forms import Asked
from orchestrator.api.gateway.gateway import Sampling, Stream
from orchestrator.api.gateway.texts import Text


def tokenizer() -> Tokenizer:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return made


TOKENIZER = tokenizer()


def told(text: str, *, stop: list[str] | None = None, tools: bool = False, finish: Finish = Finish.STOP) -> Text:
    """The text of a stream that comes token by token; what is told of it never changes."""
    asked = Asked([[1]], [Sampling(99)], 1, None, stop or [], frozenset(), True, False, False, False, tools)
    stream = Stream([1], Sampling(99), 0, 0)
    made = Text(TOKENIZER, stream, asked)
    tokens = TOKENIZER.encode(text).ids
    before = ""
    for count in range(1, len(tokens) + 1):
        last = count == len(tokens)
        stream.take(tokens[:count], [0.0] * count, finish if last else Finish.UNFINISHED, ())
        made.read()
        assert made.safe.startswith(before)
        before = made.safe
        if made.finish is not None:
            break
    return made


@pytest.mark.parametrize(
    ("text", "stop", "safe", "finish", "count"),
    [
        ("plain<end>", [], "plain", "stop", 6),
        ("größer €<end>", [], "größer €", "stop", 13),
        ("one two", ["wo"], "one t", "stop", 7),
        ("one two three", ["xx", "two"], "one ", "stop", 7),
        ("stst", ["stop"], "stst", "length", 4),
    ],
)
def test_text(text: str, stop: list[str], safe: str, finish: str, count: int) -> None:
    made = told(text, stop=stop, finish=Finish.STOP if text.endswith("<end>") else Finish.LENGTH)
    assert (made.safe, made.finish, made.count) == (safe, finish, count)


def test_tool_calls_are_taken_out_of_the_text() -> None:
    call = {"name": "add", "arguments": {"a": 1}}
    made = told(f"So: <tool_call>\n{json.dumps(call)}\n</tool_call><end>", tools=True)
    assert made.safe == "So: "
    [found] = made.calls
    assert (found["function"]["name"], json.loads(found["function"]["arguments"])) == ("add", {"a": 1})
    assert told("<tool_call>{no json}</tool_call><end>", tools=True).safe == "<tool_call>{no json}</tool_call>"
    assert tool_calls("a <tool_call>{}</tool_call>", "") == ("a <tool_call>{}</tool_call>", [])


def test_a_stream_refuses_other_tokens_than_it_has() -> None:
    stream = Stream([1], Sampling(9), 0, 0)
    stream.take([1, 2], [0.0, 0.0], Finish.UNFINISHED, ())
    stream.take([1, 3, 4], [0.0, 0.0, 0.0], Finish.STOP, ())
    assert stream.error == "a call went on with other tokens than it was given"
    assert stream.tokens == [1, 2]
