"""OpenAI's chat messages, as templates take them and as a model's text becomes one."""

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any

TOOL_OPEN = "<tool_call>"
_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def message(given: Mapping[str, Any]) -> dict[str, Any]:
    """Content in parts is joined; a tool call's arguments are an object to templates. Raises ValueError for a part that
    is no text."""
    made = dict(given)
    content = made.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise ValueError("a content's parts want type text")
        made["content"] = "".join(part["text"] for part in content)
    elif content is None:
        made["content"] = ""
    if made.get("tool_calls"):
        made["tool_calls"] = [_call(call) for call in made["tool_calls"]]
    return made


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        with contextlib.suppress(ValueError):  # as it stands
            function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}


def tool_calls(text: str, id: str) -> tuple[str, list[dict[str, Any]]]:
    """The text before its tool calls, and these: `<tool_call>{"name", "arguments"}</tool_call>`, as Hermes' and Qwen's
    templates teach. What is no such JSON stays text. The calls' ids begin with `id`."""
    calls: list[dict[str, Any]] = []
    for found in _TOOL_CALL.finditer(text):
        try:
            call = json.loads(found[1])
            name, arguments = str(call["name"]), call.get("arguments") or {}
        except (ValueError, KeyError, TypeError):
            return text, []
        function = {"name": name, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}
        calls.append({"id": f"call_{id}{len(calls)}", "type": "function", "function": function})
    return (text.partition(TOOL_OPEN)[0] if calls else text), calls
