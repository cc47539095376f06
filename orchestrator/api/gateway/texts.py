"""A stream's tokens as text: what of it may be told already, and where stop words end it."""

import secrets
from typing import Any

from tokenizers import Tokenizer

from functions.base.openai import TOOL_OPEN, tool_calls
from functions.base.samples import Finish
from orchestrator.api.gateway.forms import Asked
from orchestrator.api.gateway.gateway import Stream

UNKNOWN = "�"


class Text:
    """`count` tokens of the stream belong to the response, `safe` is the text that will not change any more."""

    def __init__(self, tokenizer: Tokenizer, stream: Stream, asked: Asked) -> None:
        self.stream = stream
        self._tokenizer, self._asked = tokenizer, asked
        self.count = 0
        self.safe = ""
        self.finish: str | None = None
        self.calls: list[dict[str, Any]] = []

    def read(self) -> None:
        """Takes in what has come. Sets `finish` when the response is whole; the stream is dropped then."""
        if self.finish is not None:
            return
        stream, stop_ids = self.stream, self._asked.stop_ids
        known, self.count = self.count, len(stream.tokens)
        at = next((i for i in range(known, self.count) if stream.tokens[i] in stop_ids), None)
        if at is not None:
            self.count = at + 1
        text = self._decoded(self.count if at is None else at)
        word = min((found for s in self._asked.stop if (found := text.find(s)) >= 0), default=None)
        if word is not None:
            text = text[:word]
            self.count = self._shortest(known, word)
        if at is not None or word is not None:
            self.finish = "stop"
        elif stream.finish != Finish.UNFINISHED:
            self.finish = "stop" if stream.finish == Finish.STOP else "length"
        if self.finish is not None:
            stream.dropped = True
            self.safe = text
            if self._asked.tools:
                self.safe, self.calls = tool_calls(text, secrets.token_hex(8))
        elif text:
            self.safe = text[: self._settled(text)]

    def _decoded(self, count: int) -> str:
        text: str = self._tokenizer.decode(self.stream.tokens[:count], skip_special_tokens=True)
        return text

    def _shortest(self, known: int, end: int) -> int:
        """The fewest tokens whose text holds a whole stop word that begins at `end`."""
        for count in range(known + 1, self.count):
            text = self._decoded(count)
            if any(text.startswith(s, end) for s in self._asked.stop):
                return count
        return self.count

    def _settled(self, text: str) -> int:
        """Where half a character, or what may become a stop word or a tool call, begins at the text's end."""
        end = len(text.rstrip(UNKNOWN))
        marks = [*self._asked.stop, *([TOOL_OPEN] if self._asked.tools else [])]
        for mark in marks:
            whole = text.find(mark)
            if whole >= 0:
                end = min(end, whole)
            end = min(end, next((i for i in range(max(0, end - len(mark)), end) if mark.startswith(text[i:end])), end))
        return max(end, len(self.safe))
