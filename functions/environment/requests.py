"""Requests of an agent's harness and their answers, in the forms that clients speak: OpenAI's chat, vLLM's tokens (as
verifiers' train client calls it), Anthropic's messages. Streams are told whole: a turn has ended when it is answered.

How a turn is sampled is the job's: temperature, max_tokens and the like of a request are not heeded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from functions.base.openai import message, tool_calls
from functions.base.wire import Json
from functions.environment.base import Said

Form = Literal["chat", "tokens", "messages"]


class Refused(Exception):
    """400: one line."""


@dataclass(frozen=True)
class Asked:
    """A request: what the policy is to go on from, either as messages or as token ids."""

    form: Form
    messages: Sequence[Json] = ()
    tools: Sequence[Json] = ()
    tokens: Sequence[int] = ()
    stream: bool = False
    logprobs: bool = False

    @property
    def whole(self) -> Json:
        """As the first of its episode: what is rendered, or the tokens."""
        if self.form == "tokens":
            return {"tokens": list(self.tokens)}
        return {"messages": list(self.messages), "tools": list(self.tools)}

    def after(self, before: Asked, said: Said, id: str) -> Json:
        """What it adds to the request before it and what was said to that. Raises Refused where it does not begin with
        these: an episode is one row of tokens."""
        if self.form == "tokens":
            known = [*said.before, *said.tokens]
            if list(self.tokens[: len(known)]) != known or len(self.tokens) == len(known):
                raise Refused("token_ids do not begin with all tokens of the episode so far, or add none")
            return {"tokens": list(self.tokens[len(known) :])}
        if self.tools != before.tools:
            raise Refused("tools are others than in the episode's first request")
        count = len(before.messages)
        wanted = [*before.messages, assistant(said.text, before, id)]
        for number, (mine, theirs) in enumerate(zip(wanted, self.messages, strict=False)):
            if _gist(mine) != _gist(theirs):
                raise Refused(
                    f"messages[{number}] is not what the episode has there: {_gist(mine)!s:.100} (an episode is "
                    "appended to: wants a harness without compaction of its context, or sub-agents)"
                )
        if len(self.messages) <= len(wanted):
            raise Refused(f"messages: the episode has {count + 1} already; a request goes on from there")
        return {"messages": list(self.messages[count + 1 :])}


def assistant(text: str, asked: Asked, id: str) -> Json:
    """The policy's turn as a message."""
    content, calls = tool_calls(text, id) if asked.tools else (text, [])
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


def _gist(given: Json) -> Json:
    """What two messages are compared by: frameworks strip text, and name calls as they like."""
    made = message(given)
    calls = [call["function"] for call in made.get("tool_calls") or ()]
    return {"role": made.get("role"), "content": made["content"].strip(),
            "calls": [(call.get("name"), call.get("arguments")) for call in calls]}  # fmt: skip


def parse(form: Form, body: Any) -> Asked:
    """Raises Refused."""
    if not isinstance(body, dict):
        raise Refused("wants a JSON object")
    if body.get("n") not in (None, 1):
        raise Refused(f"n: got {body['n']!r:.20}, an episode has one answer to a request")
    stream = body.get("stream") is True
    if form == "tokens":
        tokens, params = body.get("token_ids"), body.get("sampling_params") or {}
        if not isinstance(tokens, list) or not tokens or not all(type(i) is int and i >= 0 for i in tokens):
            raise Refused("token_ids: wants a list of token ids")
        return Asked(form, tokens=tokens, logprobs=params.get("logprobs") is not None, stream=stream)
    messages, tools = body.get("messages"), body.get("tools") or ()
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise Refused("messages: wants a list of {role, content}")
    try:
        if form == "messages":
            messages = [m for given in _system(body) + messages for m in _of_anthropic(given)]
            tools = [{"name": t["name"], "description": t.get("description", ""), "parameters": t["input_schema"]}
                     for t in tools]  # fmt: skip
            tools = [{"type": "function", "function": tool} for tool in tools]
        return Asked(form, [message(m) for m in messages], list(tools), (), stream, body.get("logprobs") is True)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"messages: {type(error).__name__}: {error}") from error


def _system(body: Json) -> list[Json]:
    return [{"role": "system", "content": body["system"]}] if body.get("system") else []


def _of_anthropic(given: Json) -> list[Json]:
    """OpenAI's messages of one of Anthropic's: its tool results come first, each as a message of its own."""
    blocks = given["content"]
    blocks = [{"type": "text", "text": blocks}] if isinstance(blocks, str) else blocks
    made = [
        {"role": "tool", "tool_call_id": b["tool_use_id"], "content": b.get("content")}
        for b in blocks
        if b["type"] == "tool_result"
    ]
    texts = [{"type": "text", "text": b["text"]} for b in blocks if b["type"] == "text"]
    calls = [
        {"id": b["id"], "type": "function", "function": {"name": b["name"], "arguments": b["input"]}}
        for b in blocks
        if b["type"] == "tool_use"
    ]
    if len(made) + len(texts) + len(calls) != len(blocks):
        raise ValueError("a content's blocks want type text, tool_use or tool_result")
    if texts or calls:
        made.append({"role": given["role"], "content": texts} | ({"tool_calls": calls} if calls else {}))
    return made


# --- answers ---------------------------------------------------------------------------------------------------------


def answer(asked: Asked, said: Said, id: str, model: str) -> Json:
    """The whole answer."""
    finish = "length" if said.cut_off else "stop"
    made, count = assistant(said.text, asked, id), len(said.tokens)
    calls = made.get("tool_calls", [])
    content = [_logprob(f"token_id:{t}", v) for t, v in zip(said.tokens, said.logprobs, strict=True)]
    if asked.form == "tokens":
        choice = {"index": 0, "finish_reason": finish, "token_ids": list(said.tokens), "logprobs": None}
        choice |= {"logprobs": {"content": content}} if asked.logprobs else {}
        return {"request_id": id, "choices": [choice], "prompt_logprobs": None}
    if asked.form == "messages":
        blocks: list[Json] = [{"type": "text", "text": made["content"]}] if made["content"] or not calls else []
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
        why = "max_tokens" if said.cut_off else "tool_use" if calls else "end_turn"
        usage = {"input_tokens": len(said.before), "output_tokens": count}
        return {"id": f"msg_{id}", "type": "message", "role": "assistant", "model": model, "content": blocks,
                "stop_reason": why, "stop_sequence": None, "usage": usage}  # fmt: skip
    choice = {"index": 0, "message": made, "finish_reason": "tool_calls" if calls and not said.cut_off else finish,
              "logprobs": {"content": content} if asked.logprobs else None, "token_ids": list(said.tokens)}  # fmt: skip
    usage = {"prompt_tokens": len(said.before), "completion_tokens": count, "total_tokens": len(said.before) + count}
    return {"id": f"chatcmpl-{id}", "object": "chat.completion", "created": 0, "model": model, "choices": [choice],
            "usage": usage, "prompt_token_ids": list(said.before)}  # fmt: skip


def _logprob(token: str, value: float) -> Json:
    return {"token": token, "logprob": float(value), "bytes": list(token.encode()), "top_logprobs": []}


def events(form: Form, whole: Json) -> list[tuple[str | None, Json | str]]:
    """(name, data) of the server-sent events that tell an answer."""
    if form == "messages":
        return [*_anthropic_events(whole), ("message_stop", {"type": "message_stop"})]
    if form == "tokens":
        return [(None, whole), (None, "[DONE]")]
    [choice] = whole["choices"]
    delta = choice["message"]
    if "tool_calls" in delta:
        delta = delta | {"tool_calls": [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]}
    frame = {**whole, "object": "chat.completion.chunk"}
    usage = frame.pop("usage")
    said = {**choice, "delta": delta, "finish_reason": None}
    del said["message"]
    end = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    return [(None, frame | {"choices": [said]}), (None, frame | {"choices": [end], "usage": usage}), (None, "[DONE]")]


def _anthropic_events(whole: Json) -> list[tuple[str, Json]]:
    told: list[Json] = [{"type": "message_start", "message": whole | {"content": [], "stop_reason": None}}]
    for index, block in enumerate(whole["content"]):
        text = block["type"] == "text"
        empty: Json = {"text": ""} if text else {"input": {}}
        delta = {"type": "text_delta", "text": block["text"]} if text else {
            "type": "input_json_delta", "partial_json": json.dumps(block["input"])
        }  # fmt: skip
        told += [{"type": "content_block_start", "index": index, "content_block": block | empty},
                 {"type": "content_block_delta", "index": index, "delta": delta},
                 {"type": "content_block_stop", "index": index}]  # fmt: skip
    end = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    told.append({"type": "message_delta", "delta": end, "usage": {"output_tokens": whole["usage"]["output_tokens"]}})
    return [(event["type"], event) for event in told]
