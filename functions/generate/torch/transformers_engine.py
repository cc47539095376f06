"""The engine for any architecture that transformers has: its `generate`, with our sampling in its place.

`generate` runs greedily over logits in which our logits processor has left one token, the one that it drew: so tokens
and log-probabilities are those of sampling.py, whatever the model. Requests go in batches of `slots`, padded on the
left; a batch lasts as long as its longest response. An earlier, partial response is part of the input; where its keys
and values came with it, all but its last token is passed over.

Keys and values of less than that (an environment has answered since) are not used.

Deterministic mode: batches of one, and a partial response goes on with the keys and values that came with it, or is
generated again from its prompt, which gives the same. What was given to it in between would not be: such samples are
refused (functions/generate/function.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, StoppingCriteria

from functions.base.samples import Finish
from functions.base.wire import Version
from functions.generate.engine.base import EngineStats, Request, Sample, Sampling
from functions.generate.engine.keys_values import Layout
from functions.generate.engine.requests import check_requests, eos_ids, unchanged, whole
from functions.generate.engine.sampling import draw, stream_keys, uniforms
from functions.generate.engine.stops import Stops, tokenizer_of
from functions.generate.torch.dynamic_cache import filled, layout_of, taken
from functions.models.parked import HostMemory, tensors_in
from functions.models.pretrained import load_causal_lm
from functions.models.router_replay import Recorder
from functions.weights.local_copy import Changes


class TransformersEngine:
    def __init__(self, *, dtype: torch.dtype, device: torch.device, slots: int, deterministic: bool) -> None:
        self._dtype, self._device, self._deterministic = dtype, device, deterministic
        self._batch = 1 if deterministic else slots
        self._version: Version | None = None
        self._model: Any = None
        self._layout: Layout | str | None = None
        self._eos = np.zeros(0, np.int64)
        self._tokenizer: Tokenizer | None = None
        self.stats = EngineStats()
        self._host = HostMemory()
        self._recorder: Recorder | None = None

    def load(self, version: Version, model_dir: Path, changes: Changes | None = None) -> int:
        if version == self._version:
            return 0
        self._version, self._model, self._layout, self._recorder = None, None, None, None
        self._model = load_causal_lm(model_dir, dtype=self._dtype, device=str(self._device))
        self._model.generation_config = GenerationConfig()
        self._eos, self._tokenizer = eos_ids(model_dir), tokenizer_of(model_dir)
        self._version = version
        return 0

    @property
    def cache_layout(self) -> Layout | str:
        self._layout = layout_of(self._model, self._device) if self._layout is None else self._layout
        return self._layout

    def park(self, weights: Path | None) -> None:
        self._host.park(tensors_in(self._model))

    def unpark(self) -> None:
        self._host.unpark()

    def close(self) -> None:
        self._model, self._version = None, None

    def generate(self, requests: Sequence[Request], sampling: Sampling, stop: Callable[[], bool]) -> Iterator[Sample]:
        if self._version is None:
            raise ValueError("generate before load: the engine holds no policy")
        config = self._model.config.get_text_config()
        check_requests(requests, sampling, getattr(config, "max_position_embeddings", None), config.vocab_size)
        number = self._version.number
        if sampling.routed_experts and self._recorder is None:
            self._recorder = Recorder(self._model)
        self.stats = EngineStats()
        left: list[Request] = []
        for request in requests:
            if len(request.response) >= sampling.max_response_length:
                yield unchanged(request, Finish.LENGTH, number)
            else:
                left.append(request if whole(request) else replace(request, cache=None))
        left.sort(key=lambda r: (r.cache is None, len(r.prompt) + len(r.response)))
        moved = sum(r.cache is not None for r in left)
        del requests
        for batch in [*self._batches(left[:moved]), *self._batches(left[moved:])]:
            if stop():
                yield from (unchanged(r, Finish.UNFINISHED, number) for r in batch)
            else:
                yield from self._generate(batch, sampling, stop, number)

    def _batches(self, requests: Sequence[Request]) -> list[Sequence[Request]]:
        return [requests[start : start + self._batch] for start in range(0, len(requests), self._batch)]

    @torch.inference_mode()
    def _run(self, draws: _Draws, batch: Sequence[Request], sampling: Sampling, cache: DynamicCache | None) -> None:
        inputs = [np.concatenate((r.prompt, draws.given(r)[0])) for r in batch]
        longest = max(map(len, inputs))
        tokens, mask = np.zeros((len(batch), longest), np.int64), np.zeros((len(batch), longest), np.int64)
        for row, line in enumerate(inputs):
            tokens[row, longest - len(line) :] = line
            mask[row, longest - len(line) :] = 1
        most = sampling.max_response_length - min(len(draws.given(r)[0]) for r in batch)
        config = GenerationConfig(max_new_tokens=most, do_sample=False, pad_token_id=0)
        self._model.generate(
            torch.from_numpy(tokens).to(self._device),
            attention_mask=torch.from_numpy(mask).to(self._device),
            generation_config=config,
            past_key_values=cache,
            logits_processor=[draws],
            stopping_criteria=[_Done(draws)],
        )

    def _generate(
        self, batch: Sequence[Request], sampling: Sampling, stop: Callable[[], bool], version: int
    ) -> Iterator[Sample]:
        begun = time.perf_counter()
        came = [r.cache for r in batch if r.cache is not None]
        cache = None
        if not isinstance(self.cache_layout, str):  # else generate makes one of the model's own kind
            cache = filled(came, self._device) if came else DynamicCache()
        placed = time.perf_counter()
        stops = Stops(self._eos, sampling, self._tokenizer)
        recorder = self._recorder if sampling.routed_experts else None
        draws = _Draws(batch, sampling, stops, stop, recorder, again=self._deterministic and not came)
        self._run(draws, batch, sampling, cache)
        ended = time.perf_counter()
        if came:
            self.stats = self.stats.plus(
                decode_tokens=draws.drawn,
                decode_steps=draws.steps,
                decode_s=ended - placed,
                moved_tokens=sum(c.tokens for c in came),
                moved_s=placed - begun,
            )
            yield from draws.samples(version, cache)
            return
        self.stats = self.stats.plus(
            prefill_tokens=sum(len(r.prompt) + len(draws.given(r)[0]) for r in batch),
            decode_tokens=draws.drawn - draws.first,
            decode_steps=max(0, draws.steps - 1),
            prefill_s=draws.first_s - begun,
            decode_s=ended - draws.first_s,
        )
        yield from draws.samples(version, cache)


class _Draws(LogitsProcessor):
    """Draws the next token of each row; `again`: an earlier response is drawn again instead of given."""

    def __init__(
        self, batch: Sequence[Request], sampling: Sampling, stops: Stops, stop: Callable[[], bool],
        recorder: Recorder | None, *, again: bool,
    ) -> None:  # fmt: skip
        self._batch, self._sampling, self._stops, self._stop, self._again = batch, sampling, stops, stop, again
        identity = np.array([(r.group, r.index) for r in batch], np.int64).T
        self._keys = stream_keys(sampling.seed, identity[0], identity[1])
        self._tokens = [list(self.given(r)[0]) for r in batch]
        self._logprobs = [list(self.given(r)[1]) for r in batch]
        self._recorder, self._experts = recorder, [list[Any]() for _ in batch]
        self.finish = np.zeros(len(batch), np.int32)
        self.steps = self.drawn = self.first = 0
        self.first_s = 0.0

    def given(self, request: Request) -> tuple[Any, Any]:
        """Tokens and log-probabilities that a request begins with."""
        return (request.response[:0], request.logprobs[:0]) if self._again else (request.response, request.logprobs)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        position = np.array([len(tokens) for tokens in self._tokens])
        uniform = torch.from_numpy(uniforms(self._keys, position)).to(scores.device)
        token, logprob = draw(scores, uniform, self._sampling, self._so_far)
        experts = None if self._recorder is None else self._recorder.last(len(scores))
        for row, (t, p) in enumerate(zip(token.tolist(), logprob.tolist(), strict=True)):
            if self.finish[row] != Finish.UNFINISHED:
                continue
            self._tokens[row].append(t)
            self._logprobs[row].append(p)
            if experts is not None:
                self._experts[row].append(experts[row])
            self.drawn += 1
            if t in self._stops.ids or (self._stops and self._stops.in_text(self._tokens[row])):
                self.finish[row] = Finish.STOP
            elif len(self._tokens[row]) >= self._sampling.max_response_length:
                self.finish[row] = Finish.LENGTH
        self.steps += 1
        if self.steps == 1:
            self.first, self.first_s = self.drawn, time.perf_counter()
        return torch.full_like(scores, -torch.inf).scatter(-1, token[:, None], 0.0)

    def _so_far(self, row: int) -> tuple[Any, Any]:
        return self._batch[row].prompt, np.array(self._tokens[row], np.int32)

    def done(self) -> bool:
        return bool((self.finish != Finish.UNFINISHED).all()) or self._stop()

    def samples(self, version: int, cache: DynamicCache | None) -> Iterator[Sample]:
        """`cache`: the batch's keys and values, for those that are not done."""
        for row, request in enumerate(self._batch):
            tokens, logprobs = np.array(self._tokens[row], np.int32), np.array(self._logprobs[row], np.float32)
            finish, own = Finish(int(self.finish[row])), None
            given, recorder = self.given(request)[0], self._recorder
            experts = None if recorder is None else recorder.whole(request.experts, len(given), self._experts[row])
            if len(tokens) < len(request.response):  # cut while it was drawn again
                tokens, logprobs, experts = request.response, request.logprobs, request.experts
            elif finish == Finish.UNFINISHED and cache is not None:
                own = taken(cache, row, len(request.prompt) + len(tokens) - 1)
            yield Sample(request.number, tokens, logprobs, finish, version, own, experts)


class _Done(StoppingCriteria):
    def __init__(self, draws: _Draws) -> None:
        self._draws = draws

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), self._draws.done(), dtype=torch.bool, device=input_ids.device)
