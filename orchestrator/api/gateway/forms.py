"""What OpenAI's, vLLM's and verifiers' clients send and want back, as plain dicts.

A key that would change the answer and is not known here is refused by its name: nothing is silently ignored that a
client could miss. Token ids are the truth; text is made of them.
"""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from functions.base.chat import Chat
from functions.base.openai import message
from functions.base.suggest import did_you_mean
from orchestrator.api.gateway.gateway import Sampling

IGNORED = {"model", "user", "store", "metadata", "stream_options", "parallel_tool_calls", "service_tier", "request_id",
           "cache_salt", "priority", "skip_special_tokens", "spaces_between_special_tokens", "safety_identifier",
           "prompt_cache_key", "include_stop_str_in_output", "detokenize"}  # fmt: skip
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "min_p": (0,), "min_tokens": (0,),
    "logit_bias": ({},), "echo": (False,), "best_of": (1,), "suffix": ("",), "top_logprobs": (0, 1),
    "response_format": ({"type": "text"},), "functions": ([],), "prompt_logprobs": (0,), "features": (),
    "kv_transfer_params": (), "bad_words": ([],), "reasoning_effort": (),
}  # fmt: skip
"""Keys that are known but do nothing here, with the values at which that changes nothing; None is always one."""
LARGEST_N = 128
GROUPS = 1 << 31


class Refused(Exception):
    """400: one line that names the key."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Asked:
    """A request, whatever form it came in."""

    prompts: Sequence[Sequence[int]]
    sampling: Sequence[Sampling]
    """Of each prompt."""
    n: int
    seed: int | None
    stop: Sequence[str]
    stop_ids: frozenset[int]
    stream: bool
    usage: bool
    """Whether a stream ends with the counts."""
    logprobs: bool
    token_ids: bool
    """Whether the answer names token ids beside the text."""
    tools: bool

    def group(self, prompt: int) -> int:
        """Of the random stream. With a seed it depends on nothing else, so that the same request samples the same."""
        if self.seed is None:
            return secrets.randbelow(GROUPS)
        digest = hashlib.sha256(f"{self.seed}/{prompt}".encode()).digest()
        return int.from_bytes(digest[:8], "big") % GROUPS


COMMON = {"temperature", "top_p", "top_k", "n", "seed", "stop", "stop_token_ids", "max_tokens", "ignore_eos", "stream",
          "logprobs", "return_token_ids"}  # fmt: skip


def of_chat(body: Mapping[str, Any], chat: Chat, context: int | None) -> Asked:
    _known(body, COMMON | {"messages", "tools", "tool_choice", "max_completion_tokens"})
    messages, tools = body.get("messages"), body.get("tools") or None
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise Refused("messages: wants a list of {role, content}", "messages")
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise Refused('tool_choice: wants "auto" or "none"', "tool_choice")
    tools = None if choice == "none" else tools
    try:
        tokens = chat.encode([message(m) for m in messages], tools)
    except ValueError as error:
        raise Refused(f"messages: {error}", "messages") from error
    most = body.get("max_completion_tokens")
    body = body if most is None else {**body, "max_tokens": most}
    return _asked(body, [tokens], context, logprobs=body.get("logprobs") is True, tools=tools is not None)


def of_completion(body: Mapping[str, Any], chat: Chat, context: int | None) -> Asked:
    _known(body, COMMON | {"prompt"})
    given = body.get("prompt")
    if isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int)):
        given = [given]
    if not isinstance(given, list) or not given:
        raise Refused("prompt: wants text, a list of texts, token ids, or a list of such", "prompt")
    prompts = [chat.encode(p) if isinstance(p, str) else _ids(p, "prompt", chat) for p in given]
    logprobs = body.get("logprobs") is not None and body.get("logprobs") is not False
    return _asked({"max_tokens": 16, **body}, prompts, context, logprobs=logprobs)


def of_tokens(body: Mapping[str, Any], chat: Chat, context: int | None) -> Asked:
    """vLLM's POST /inference/v1/generate (vllm/entrypoints/serve/disagg/protocol.py)."""
    _known(body, {"token_ids", "sampling_params", "stream"})
    params = body.get("sampling_params") or {}
    if not isinstance(params, dict):
        raise Refused("sampling_params: wants an object", "sampling_params")
    _known(params, COMMON - {"stream"})
    tokens = _ids(body.get("token_ids"), "token_ids", chat)
    logprobs = params.get("logprobs") is not None and params.get("logprobs") is not False
    return _asked({"max_tokens": 16, **params, "stream": body.get("stream")}, [tokens], context, logprobs=logprobs)


def _asked(
    body: Mapping[str, Any], prompts: Sequence[Sequence[int]], context: int | None, *, logprobs: bool,
    tools: bool = False,
) -> Asked:  # fmt: skip
    n = int(_number(body, "n", 1, 1, LARGEST_N, whole=True))
    top_k = int(_number(body, "top_k", 0, -1, 1 << 30, whole=True))
    top_p = _number(body, "top_p", 1.0, 0.0, 1.0)
    if top_p == 0:
        raise Refused("top_p: got 0, wants more than 0", "top_p")
    wanted = body.get("max_tokens")
    most = None if wanted is None else int(_number(body, "max_tokens", 1, 1, 1 << 30, whole=True))
    if most is None and context is None:
        raise Refused("max_tokens: this model names no context, so that it has to be said", "max_tokens")
    sampling = []
    for prompt in prompts:
        if not prompt:
            raise Refused("the prompt is empty", "prompt")
        room = None if context is None else context - len(prompt)
        if room is not None and (room < 1 or (most or 1) > room):
            more = f" and max_tokens {most}" if most else ""
            raise Refused(f"the prompt has {len(prompt)} tokens{more}; the model's context is {context}", "max_tokens")
        length = most if most is not None else room
        assert length is not None
        temperature = _number(body, "temperature", 1.0, 0.0, 100.0)
        sampling.append(Sampling(length, temperature, top_p, max(0, top_k), body.get("ignore_eos") is True))
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(s, str) and s for s in stop):
        raise Refused("stop: wants text or a list of texts", "stop")
    ids = body.get("stop_token_ids") or []
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise Refused("stop_token_ids: wants a list of token ids", "stop_token_ids")
    seed = body.get("seed")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise Refused(f"seed: got {seed!r}, wants a whole number", "seed")
    usage = bool((body.get("stream_options") or {}).get("include_usage"))
    return Asked(prompts, sampling, n, seed, stop, frozenset(ids), body.get("stream") is True, usage, logprobs,
                 body.get("return_token_ids") is True, tools)  # fmt: skip


def _known(body: Mapping[str, Any], keys: set[str]) -> None:
    for name, value in body.items():
        if name in keys or name in IGNORED or value is None:
            continue
        if name not in NEUTRAL:
            raise Refused(f"{name}: no such key here{did_you_mean(name, keys)}", name)
        if value not in NEUTRAL[name]:
            raise Refused(f"{name}: got {value!r:.60}, this server knows only {NEUTRAL[name] or 'none'}", name)


def _number(
    body: Mapping[str, Any], name: str, default: float, least: float, most: float, *, whole: bool = False
) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not least <= value <= most:
        raise Refused(f"{name}: got {value!r:.60}, wants a number from {least:g} to {most:g}", name)
    return float(value)


def _ids(value: Any, name: str, chat: Chat) -> list[int]:
    size = chat.tokenizer.get_vocab_size()
    if not isinstance(value, list) or not value or not all(type(i) is int and 0 <= i < size for i in value):
        raise Refused(f"{name}: wants a list of token ids from 0 to {size - 1}", name)
    return value
