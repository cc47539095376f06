"""What a model's chat template makes of turns and answers: tokens to text, messages to tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from functions.base.chat import Chat
from functions.base.turns import Turns, stops
from functions.environment.base import Answer


class Template:
    def __init__(self, directory: Path, kwargs: Mapping[str, Any]) -> None:
        """`kwargs` go to the template. Raises ValueError, in one line."""
        self.chat = Chat.load(directory, kwargs)
        self._stops = stops(directory, self.chat)
        self._turns: dict[str, Turns] = {}

    def text(self, tokens: Sequence[int]) -> str:
        """Of a turn, without the token that ended it."""
        text: str = self.chat.tokenizer.decode(list(tokens), skip_special_tokens=False)
        return next((text.removesuffix(stop) for stop in self._stops if text.endswith(stop)), text)

    def given(self, answer: Answer, role: str) -> list[int]:
        """Token ids of an answer; `role`: of its observations. Raises ValueError where the template refuses it."""
        asked = answer.asked
        if asked is None:
            turns = self._of(role)
            return turns.between([turns.message(text, name) for name, text in answer.observations])
        if "tokens" in asked:
            return list(asked["tokens"])
        if "tools" in asked:
            return self.chat.encode(asked["messages"], asked["tools"] or None)
        return self._of("tool" if asked["messages"][0].get("role") == "tool" else "user").between(asked["messages"])

    def _of(self, role: str) -> Turns:
        if role not in self._turns:
            self._turns[role] = Turns(self.chat, self._stops, role)
        return self._turns[role]
