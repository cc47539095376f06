"""The tool calls in what an assistant wrote.

    <tool_call>{"name": "add", "arguments": {"a": 5, "b": 8}}</tool_call>      Hermes, Qwen; as many as there are
    {"name": "add", "parameters": {"a": 5, "b": 8}}                            Llama 3: the whole turn

`arguments` and `parameters` are the same; arguments may also be JSON in a string (OpenAI's form).
"""

import json
import re
from dataclasses import dataclass
from typing import Any

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Any
    problem: str | None = None
    """Why it cannot be read, for the model."""


def tool_calls(text: str) -> list[ToolCall]:
    """Those of one turn, in order; what begins as a call and is none has a `problem`."""
    found = _TAGGED.findall(text)
    if found:
        return [read_call(body) for body in found]
    bare = text.strip().removeprefix("<|python_tag|>").strip()
    if not (bare.startswith("{") and bare.endswith("}") and '"name"' in bare):
        return []
    return [read_call(bare)]


def read_call(body: str) -> ToolCall:
    try:
        return as_call(json.loads(body))
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"the tool call is not JSON: {error}")


def as_call(value: Any) -> ToolCall:
    """From {"name", "arguments"}."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, 'a tool call is {"name": ..., "arguments": {...}}')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return ToolCall(value["name"], {}, f"its arguments are not JSON: {error}")
    return ToolCall(value["name"], {} if arguments is None else arguments)
