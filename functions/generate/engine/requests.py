"""What every engine checks and reads the same way: whether requests fit, and which tokens end a response."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from functions.base.samples import Finish
from functions.generate.engine.base import Request, Sample, Sampling
from functions.generate.engine.keys_values import Layout


def check_requests(requests: Sequence[Request], sampling: Sampling, context: int | None, vocabulary: int) -> None:
    """Raises ValueError naming the first request that does not fit into `context` positions (None: no limit), or has a
    token that the model does not know."""
    for r in requests:
        who = f"sample (group {r.group}, index {r.index})"
        if len(r.prompt) == 0:
            raise ValueError(f"{who} has an empty prompt")
        if context is not None and len(r.prompt) + sampling.max_response_length > context:
            raise ValueError(
                f"{who}: prompt of {len(r.prompt)} tokens plus max_response_length {sampling.max_response_length} "
                f"exceeds the model's context of {context}"
            )
        for what, tokens in (("prompt", r.prompt), ("response", r.response)):
            for token in tokens[(tokens < 0) | (tokens >= vocabulary)][:1]:
                raise ValueError(f"{who}: its {what} has token {token}, the model's vocabulary has {vocabulary}")


def check_caches(requests: Sequence[Request], layout: Layout | str) -> None:
    """Raises ValueError naming the first request whose keys and values are not what an engine of `layout` goes on
    with: of another kind, or not of all of its tokens but the last."""
    for r in requests:
        if r.cache is None:
            continue
        who = f"sample (group {r.group}, index {r.index}): its keys and values are"
        if r.cache.layout != layout:
            wanted = f"this engine takes {layout}" if isinstance(layout, Layout) else f"this engine has none: {layout}"
            raise ValueError(f"{who} {r.cache.layout}; {wanted}")
        if not fits(r, r.cache.tokens):
            raise ValueError(
                f"{who} of {r.cache.tokens} tokens; wants those of its {len(r.prompt)} prompt and {len(r.response)} "
                "response tokens, up to the last but one"
            )


def fits(request: Request, tokens: int) -> bool:
    """Whether keys and values of so many tokens are those of a request's prompt, and of its response up to its last
    token, or of less of it: of what an environment answered there are none yet."""
    return len(request.prompt) <= tokens < len(request.prompt) + len(request.response)


def whole(request: Request) -> bool:
    """Whether it has keys and values of all of its tokens but the last."""
    return request.cache is not None and request.cache.tokens == len(request.prompt) + len(request.response) - 1


def eos_ids(model_dir: Path) -> npt.NDArray[np.int64]:
    """End-of-sequence ids: generation_config.json's, else config.json's. Empty where the model names none."""
    for name in ("generation_config.json", "config.json"):
        file = model_dir / name
        ids = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
        if ids is not None:
            return np.atleast_1d(np.array(ids, np.int64))
    return np.zeros(0, np.int64)


def unchanged(request: Request, finish: Finish, version: int) -> Sample:
    """The request as it came."""
    cache = request.cache if finish == Finish.UNFINISHED else None
    return Sample(request.number, request.response, request.logprobs, finish, version, cache, request.experts)
