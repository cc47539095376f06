"""The torch engine: an own decode loop for Llama-shaped models.

    requests --admit--> cohorts --step--> one token for every row of every cohort --release--> samples
                 |          (projections over all rows at once, attention cohort by cohort: cache.py)
              prefill, once per prompt; a head that all prompts share, once per call

Continuous batching: a row whose sample is done leaves at once (the last rows move into the gaps), and when a quarter
of the slots is free the next prompts are admitted as a new cohort. An earlier, partial response is prefilled with its
prompt, unless its keys and values came with it: then nothing of it is computed, and its next token is a step like any.
What follows the keys and values that came (an environment's answer) goes through decoding, unless it is long: then all
is prefilled.

Deterministic mode: the tokens and log-probabilities of a sample are the same bits whatever else is generated with it.
Each prompt is prefilled alone; cohorts hold rows of one prompt, at most `_LANES`; projections always run over exactly
`slots` rows; and a partial response goes on with the keys that the first attempt had: they came with it, or it is
replayed through decoding, token by token. Every kernel then sees shapes that depend on the sample and on `slots` alone,
and one thread.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from functions.algorithms.penalties import History
from functions.base.samples import Finish
from functions.base.wire import Version
from functions.generate.engine.base import EngineStats, Request, Sample, Sampling
from functions.generate.engine.keys_values import Layout
from functions.generate.engine.requests import check_requests, eos_ids, unchanged
from functions.generate.engine.sampling import draw, uniforms
from functions.generate.engine.stops import Stops, tokenizer_of
from functions.generate.torch.cache import Cache, placed
from functions.generate.torch.cohort import Cohort, Ints
from functions.generate.torch.llama import Llama, load
from functions.generate.torch.prefill import common_head, prefill
from functions.models.parked import HostMemory, tensors_in
from functions.weights.local_copy import Changes

_LANES = 8
"""Rows of one prompt that a deterministic cohort folds together; empty ones are computed too."""
_REFILL = 4
"""New prompts are admitted when 1 / _REFILL of the slots is free."""
_DECODED = 64
"""Tokens after the keys and values that came with a request which are still decoded one by one."""


class TorchEngine:
    def __init__(
        self, *, dtype: torch.dtype, device: torch.device, slots: int, deterministic: bool, prefill_tokens: int = 4096
    ) -> None:
        self._dtype, self._device = dtype, device
        self._slots, self._deterministic, self._prefill_tokens = slots, deterministic, prefill_tokens
        self._version: Version | None = None
        self._model: Llama | None = None
        self._rotations: dict[str, Tensor] = {}
        self._eos = np.zeros(0, np.int64)
        self._tokenizer: Tokenizer | None = None
        self.stats = EngineStats()
        self._host, self._unpacked = HostMemory(), HostMemory()
        """Where its weights are while it is parked; those that its projections pack apart: they come back packed."""
        self._head: Tensor | None = None
        """Keys and values of what all prompts of the call begin with."""

    def load(self, version: Version, model_dir: Path, changes: Changes | None = None) -> int:
        if version == self._version:
            return 0
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(model_dir)
        self._version, self._model = None, None  # a failed load leaves no policy, and two never fill the memory
        self._model = load(model_dir, config, dtype=self._dtype, device=self._device)
        self._eos, self._tokenizer = eos_ids(model_dir), tokenizer_of(model_dir)
        self._rotations = {}
        self._version = version
        return 0

    def limits(self, requests: Sequence[Request], sampling: Sampling) -> Ints:
        """The most response tokens that each request may have (bench/rollout.py forces lengths here)."""
        return np.full(len(requests), sampling.max_response_length)

    @property
    def cache_layout(self) -> Layout | str:
        model = self._held()
        return Layout(model.kv_heads, len(model.layers), model.head_dim, model.dtype, "scaled pairs")

    def park(self, weights: Path | None) -> None:
        model = self._held()
        self._head, self._rotations = None, {}
        for linear in model.linears():
            linear.unpack()
        self._host.park(tensors_in(model))
        self._unpacked.park(tensors_in([(linear.weight, linear.bias) for linear in model.linears()]))

    def unpark(self) -> None:
        self._host.unpark()
        self._unpacked.unpark()
        for linear in self._held().linears():
            linear.pack()
        self._unpacked = HostMemory()

    def close(self) -> None:
        self._model, self._version = None, None

    def generate(self, requests: Sequence[Request], sampling: Sampling, stop: Callable[[], bool]) -> Iterator[Sample]:
        if self._model is None or self._version is None:
            raise ValueError("generate before load: the engine holds no policy")
        model, number = self._model, self._version.number
        check_requests(requests, sampling, model.context, len(model.embed))
        self.stats = EngineStats()
        stops = Stops(self._eos, sampling, self._tokenizer)
        full = [r for r in requests if len(r.response) >= sampling.max_response_length]
        yield from (unchanged(r, Finish.LENGTH, number) for r in full)
        queue = deque(self._shares(self._worth(r) for r in requests if len(r.response) < sampling.max_response_length))
        del requests, full  # the memory of keys and values that came with them is free when they are in their places
        if not queue:
            return
        self._rotate(max(len(share[0].prompt) for share in queue) + sampling.max_response_length)
        computed = [self._prefix(share[0]) for share in queue if share[0].cache is None]
        self._head = None if self._deterministic or not computed else self._share(computed)
        cohorts: list[Cohort] = []
        while (queue or cohorts) and not stop():
            free = self._slots - sum(map(len, cohorts))
            if queue and len(queue[0]) <= free and (not cohorts or free * _REFILL >= self._slots):
                cohorts += self._admit(queue, free, sampling, stops)
            else:
                self._step(cohorts, sampling, stops)
            for cohort in cohorts:
                if cohort.done:
                    yield from cohort.release(number, sampling.keep_from)
            cohorts = [cohort for cohort in cohorts if len(cohort)]
        for cohort in cohorts:
            yield from cohort.rest(number)
        for share in queue:
            yield from (unchanged(r, Finish.UNFINISHED, number) for r in share)

    def _worth(self, request: Request) -> Request:
        """Without its keys and values where most of it is to be computed anyway."""
        tokens = len(request.prompt) + len(request.response)
        far = request.cache is not None and tokens - request.cache.tokens > _DECODED
        return replace(request, cache=None) if far and not self._deterministic else request

    def _shares(self, requests: Iterator[Request]) -> list[list[Request]]:
        """Requests that share a prefix and fit into one cohort, in the order of their first. In deterministic mode
        those that come with keys and values share their prompt's, if they have equally many of their own."""
        shares: dict[tuple[int, bytes, int], list[Request]] = {}
        for number, request in enumerate(requests):
            came = request.cache.tokens if request.cache is not None and self._deterministic else -1 - number
            key = (request.group, self._prefix(request).tobytes(), 0 if request.cache is None else came)
            shares.setdefault(key, []).append(request)
        width = min(_LANES, self._slots) if self._deterministic else self._slots
        return [share[i : i + width] for share in shares.values() for i in range(0, len(share), width)]

    def _prefix(self, request: Request) -> npt.NDArray[np.int32]:
        return request.prompt if self._deterministic else np.concatenate((request.prompt, request.response))

    def _admit(self, queue: deque[list[Request]], free: int, sampling: Sampling, stops: Stops) -> list[Cohort]:
        """Takes the next shares that fit into the free slots: prefills them and samples the first token of their
        requests, or puts the keys and values that came with them into their place."""
        shares: list[list[Request]] = []
        while queue and len(queue[0]) <= free:
            shares.append(queue.popleft())
            free -= len(shares[-1])
        moved = [share for share in shares if share[0].cache is not None]
        computed = [share for share in shares if share[0].cache is None]
        if self._deterministic:
            moves, prefills = [[share] for share in moved], [[share] for share in computed]
        else:
            moves, prefills = [moved], [computed]
        cohorts = [self._moved(part, sampling) for part in moves if part]
        return cohorts + [self._cohort(part, sampling, stops) for part in prefills if part]

    @torch.inference_mode()
    def _share(self, prompts: Sequence[npt.NDArray[np.int32]]) -> Tensor | None:
        """Keys and values of the prompts' common head, where they have one."""
        begun, size = time.perf_counter(), common_head(prompts)
        if not size:
            return None
        cache, _ = prefill(self._held(), self._rotations, [prompts[0][:size]], self._prefill_tokens)
        self.stats = self.stats.plus(prefill_tokens=size, shared_tokens=-size, prefill_s=time.perf_counter() - begun)
        return cache[:, :, 0]

    @torch.inference_mode()
    def _cohort(self, shares: Sequence[list[Request]], sampling: Sampling, stops: Stops) -> Cohort:
        model, begun = self._held(), time.perf_counter()
        prompts = [self._prefix(share[0]) for share in shares]
        prefix, logits = prefill(model, self._rotations, prompts, self._prefill_tokens, self._head)
        group = np.repeat(np.arange(len(shares)), [len(share) for share in shares])
        lengths = np.array([len(p) for p in prompts])
        lanes = _LANES if self._deterministic else max(map(len, shares))
        requests = [request for share in shares for request in share]
        cache = Cache(prefix, lengths, group, lanes)
        limits = self.limits(requests, sampling)
        none = np.zeros(len(requests), np.int64) if self._deterministic else None
        cohort = Cohort(requests, cache, limits, sampling.seed, begun=none)
        rows = torch.from_numpy(group).to(self._device)
        self._sample([cohort], logits[rows], sampling, stops)
        computed = int(lengths.sum()) - (0 if self._head is None else self._head.shape[3] * len(lengths))
        self.stats = self.stats.plus(
            prefill_tokens=computed,
            shared_tokens=int(lengths[group].sum()) - computed,
            prefill_s=time.perf_counter() - begun,
        )
        return cohort

    @torch.inference_mode()
    def _moved(self, shares: Sequence[list[Request]], sampling: Sampling) -> Cohort:
        """A cohort of requests that bring their keys and values. In deterministic mode these lie where they lay when
        they were computed, a response's as its row's own; else whole samples are prefixes, for their lengths differ."""
        begun = time.perf_counter()
        requests = [request for share in shares for request in share]
        caches = [request.cache.tensor for request in requests if request.cache is not None]
        group = np.repeat(np.arange(len(shares)), [len(share) for share in shares])
        after = caches[0].shape[3] - len(requests[0].prompt) if self._deterministic else 0
        there = np.array([c.shape[3] - len(r.prompt) + 1 for c, r in zip(caches, requests, strict=True)])
        prefix, lengths, own = placed(caches, group, after, self._device)
        cache = Cache(prefix, lengths, group, _LANES if self._deterministic else 1, own)
        cohort = Cohort(requests, cache, self.limits(requests, sampling), sampling.seed, begun=there)
        self.stats = self.stats.plus(moved_tokens=sum(c.shape[3] for c in caches), moved_s=time.perf_counter() - begun)
        return cohort

    @torch.inference_mode()
    def _step(self, cohorts: Sequence[Cohort], sampling: Sampling, stops: Stops) -> None:
        """One more token for every row."""
        model, begun = self._held(), time.perf_counter()
        bounds = np.cumsum([0] + [len(c) for c in cohorts])
        rows = int(bounds[-1])
        width = self._slots if self._deterministic else rows
        token, position = np.zeros(width, np.int64), np.zeros(width, np.int64)
        token[:rows] = np.concatenate([c.last for c in cohorts])
        position[:rows] = np.concatenate([c.positions for c in cohorts])
        at = torch.from_numpy(position).to(self._device)
        rotation = {name: table[at] for name, table in self._rotations.items()}
        for cohort in cohorts:
            cohort.cache.grow()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            window = model.layers[layer].window
            if len(cohorts) == 1 and rows == width:
                return cohorts[0].cache.attend(layer, window, q, k, v).flatten(1)
            out = q.new_zeros(q.shape)
            for cohort, start, end in zip(cohorts, bounds[:-1], bounds[1:], strict=True):
                part = slice(start, end)
                out[part] = cohort.cache.attend(layer, window, q[part], k[part], v[part])
            return out.flatten(1)

        hidden = model.hidden(torch.from_numpy(token).to(self._device), rotation, attend)
        for cohort in cohorts:
            cohort.cache.length += 1
        self._sample(cohorts, model.logits(hidden)[:rows], sampling, stops)
        self.stats = self.stats.plus(decode_tokens=rows, decode_steps=1, decode_s=time.perf_counter() - begun)

    def _sample(self, cohorts: Sequence[Cohort], logits: Tensor, sampling: Sampling, stops: Stops) -> None:
        keys, lengths = np.concatenate([c.keys for c in cohorts]), np.concatenate([c.lengths for c in cohorts])
        uniform = torch.from_numpy(uniforms(keys, lengths)).to(self._device)
        token, logprob = (t.cpu().numpy() for t in draw(logits, uniform, sampling, _history(cohorts)))
        start = 0
        for cohort in cohorts:
            end = start + len(cohort)
            cohort.record(token[start:end], logprob[start:end], stops)
            start = end

    def _held(self) -> Llama:
        assert self._model is not None
        return self._model

    def _rotate(self, positions: int) -> None:
        """Rotation tables for at least that many positions."""
        if any(len(table) < positions for table in self._rotations.values()) or not self._rotations:
            self._rotations = self._held().rotations(positions)


def _history(cohorts: Sequence[Cohort]) -> History:
    """Of the rows of all cohorts, one after the other."""
    rows = [(cohort, row) for cohort in cohorts for row in range(len(cohort))]
    return lambda number: rows[number][0].so_far(rows[number][1])
