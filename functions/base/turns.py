"""What a chat template writes between an assistant's turn and the one that follows: an observation's tokens.

    what was sampled    ...<|im_start|>assistant  5+8 is <tool_call>...</tool_call><|im_end|>
    between(...)                        \n<|im_start|>tool 13 ...  and on to where the assistant goes on

Tokens are only ever appended. A conversation that is rendered and encoded anew after each turn drifts: text that was
sampled as one row of tokens is encoded as another (verl#3720, #3960). So the template renders a conversation that
stands for all others, with and without the messages that follow its last turn, and what it adds is what is appended (as
TRL, `_get_tool_suffix_ids` of trl/trainer/grpo_trainer.py). That is right for templates that write the same for a turn
whatever comes after it; others are refused.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from functions.base.chat import Chat, Messages

_ASKED = {"role": "user", "content": "question"}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "name", "arguments": {}}}
_TOLD = "observation"


class Turns:
    """Of one chat template. `stops`: the texts of the tokens that end an assistant's turn."""

    def __init__(self, chat: Chat, stops: Sequence[str], role: str) -> None:
        """`role`: of the observations, "tool" or "user". Raises ValueError in one line for a template that has no such
        messages, or does not keep what it wrote before them."""
        self.chat, self.stops, self.role = chat, stops, role
        self._last = self._understood()
        if role == "user":
            self._suffix(
                [{"role": "assistant", "content": "<think>\nthought\n</think>\n\nanswer"}], [self.message(_TOLD)]
            )

    def message(self, content: str, name: str = "") -> Mapping[str, Any]:
        """An observation as the template takes it."""
        if self.role == "user":
            return {"role": "user", "content": content}
        return {"role": "tool", "name": name, "content": content, "tool_call_id": _CALL["id"]}

    def between(self, observations: Messages) -> list[int]:
        """Token ids of the messages that follow an assistant's turn (its last token is one of `stops`), up to where the
        assistant goes on. Raises ValueError where the template refuses them."""
        return self.chat.encode_rendered(self._suffix(self._last, observations))

    def _understood(self) -> list[Mapping[str, Any]]:
        """An assistant's turn that the template lets observations follow: plain, or one that calls a tool."""
        called = [_CALL, {**_CALL, "function": {"name": "name", "arguments": "{}"}}]
        turns: list[Mapping[str, Any]] = [{"role": "assistant", "content": "answer"}]
        if self.role == "tool":
            turns += [{"role": "assistant", "content": "answer", "tool_calls": [call]} for call in called]
        failure = ValueError("")
        for turn in turns:
            try:
                if _TOLD in self._suffix([turn], [self.message(_TOLD, "name")]):
                    return [turn]
                failure = ValueError(f"the chat template does not write messages of role {self.role!r}")
            except ValueError as error:
                failure = error
        raise failure

    def _suffix(self, last: Messages, observations: Messages) -> str:
        before = self.chat.render([_ASKED, *last], go_on=False)
        after = self.chat.render([_ASKED, *last, *observations])
        if not after.startswith(before):
            raise ValueError(
                f"the chat template writes an assistant's turn otherwise once a message of role {self.role!r} follows "
                "it: what was sampled would not be what it reads; give the model a template that keeps it "
                "(chat_template.jinja in its directory)"
            )
        said = max(0, before.rfind("answer"))  # the end of the turn, not of what was asked
        end = max((before.rfind(stop) + len(stop) for stop in self.stops if stop in before[said:]), default=0)
        if not end:
            wanted = ", ".join(map(repr, self.stops)) or "none"
            raise ValueError(
                f"the chat template does not end an assistant's turn with a token that the model stops at ({wanted}, "
                "eos_token_id of generation_config.json or config.json)"
            )
        return after[end:]


def stops(directory: Path, chat: Chat) -> list[str]:
    """The texts of a model directory's end-of-sequence tokens: generation_config.json's, else config.json's."""
    for name in ("generation_config.json", "config.json"):
        file = directory / name
        ids = json.loads(file.read_bytes()).get("eos_token_id") if file.exists() else None
        if ids is not None:
            texts = [chat.tokenizer.id_to_token(i) for i in (ids if isinstance(ids, list) else [ids])]
            return [text for text in texts if text is not None]
    return []


def check_tools(chat: Chat, tools: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError in one line for a template that does not write the names of the tools it is given."""
    text = chat.render([_ASKED], tools)
    lacking = [tool["function"]["name"] for tool in tools if tool["function"]["name"] not in text]
    if lacking:
        raise ValueError(
            f"the chat template does not name the environment's tools ({', '.join(lacking)}): give the model one that "
            "writes `tools` (chat_template.jinja in its directory)"
        )
