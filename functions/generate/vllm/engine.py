"""The vLLM engine: paged KV cache, continuous batching, prefix cache, new policy versions in place.

    requests --add--> vLLM's scheduler --step--> finished samples          every sample is a request of its own;
                            ^                                              samples of a prompt find its blocks cached
       load(version): worker reloads weights in place, prefix cache emptied, or an adapter is swapped

Log-probabilities are vLLM's `processed_logprobs`: those of the distribution that was sampled from. The noise of a token
depends on (seed, group, index, position) alone, so that a sample does not depend on its neighbours, and a cut sample
goes on with the stream it had (worker.py on a CPU, vLLM's second model runner on a GPU; its first one on a GPU
draws from a generator: there a cut sample goes on with a fresh stream).

A sample's earlier response is part of the next prompt: prefilled with it, but for the blocks of keys and values that
came along (cache.py). Requests are stepped from the caller's
thread; nothing runs between two samples taken from `generate`.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from functions.base.samples import Finish
from functions.base.wire import Version
from functions.call.function import ReplicaBroken
from functions.generate.engine.base import EngineStats, Request, Sample, Sampling
from functions.generate.engine.keys_values import Layout as CacheLayout
from functions.generate.engine.requests import check_caches, check_requests, eos_ids, unchanged
from functions.generate.engine.sampling import stream_keys
from functions.generate.vllm.adapter import Adapter, Layout, read_adapter, read_layout
from functions.generate.vllm.cache import BlockCache
from functions.generate.vllm.start import VllmSettings, start
from functions.weights.local_copy import SOURCE, Changes

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine

_IDLE_S = 5.0
"""How long the blocks of ended requests may take to come back before the prefix cache counts as not reset."""


class VllmEngine:
    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._engine: LLMEngine | None = None
        self._blocks: BlockCache | None = None
        self._layout: Layout = {}
        self._config: dict[str, Any] = {}
        self._version: Version | None = None
        self._adapter: LoRARequest | None = None
        self._base: Path | None = None
        self._eos: list[int] = []
        self.stats = EngineStats()
        self._files: Path | None = None
        """Where the weights lie that sleep dropped; None: it kept them."""
        self.read_bytes: list[int] = []
        """Of each rank that read its slices from the exchange, for the latest version that did not come as a delta."""

    # --- versions --------------------------------------------------------------------------------------------------

    def load(self, version: Version, model_dir: Path, changes: Changes | None = None) -> int:
        """See Engine. Of a directory with holes the ranks read their slices of the weights themselves. One with
        adapter_config.json is a LoRA adapter for the base model that it names.

        The same architecture is updated in place, another one starts a new engine (so does a new base model under
        adapters). Raises ReplicaBroken when an update in place failed: the weights may then be half new, and this
        process must not sample any more.
        """
        self.read_bytes = []
        if version == self._version:
            return 0
        adapter = read_adapter(model_dir)
        if adapter is not None:
            self._load_adapter(version, adapter)
            return 0
        held, self._version, self._base = self._version, None, None
        self._load_weights(model_dir, None if changes is None or changes.since != held else changes)
        self._version, self._base = version, model_dir
        return sum(self.read_bytes)

    def _load_weights(self, model_dir: Path, changes: Changes | None = None) -> None:
        layout = read_layout(model_dir)
        holes = (model_dir / SOURCE).is_file()
        config = {**json.loads((model_dir / "config.json").read_bytes()), SOURCE: holes}
        if self._engine is None or self._settings.lora_rank or (layout, config) != (self._layout, self._config):
            self.close()
            self._engine = start(model_dir, self._settings)
            self._blocks = BlockCache(self._engine)
            self._layout, self._config = layout, config
            if holes:
                self._reload(model_dir, None)
        else:
            self._reload(model_dir, changes)
        self._eos = eos_ids(model_dir).tolist()

    def _reload(self, model_dir: Path, changes: Changes | None) -> None:
        try:
            if changes is None or not self._patched(model_dir, changes):
                self.read_bytes = self.held().collective_rpc("rlhf_reload", args=(str(model_dir),))
        except Exception as error:
            raise ReplicaBroken(f"weights of {model_dir} could not be applied in place: {error}") from error
        self.forget_prefixes()

    def _patched(self, model_dir: Path, changes: Changes) -> bool:
        """Whether the changes alone made the weights those of `model_dir`. On a CPU its files are read in less time."""
        if _on_cpu() and not (model_dir / SOURCE).is_file():
            return False
        return all(self.held().collective_rpc("rlhf_patch", args=(str(model_dir), changes.deltas)))

    def _load_adapter(self, version: Version, adapter: Adapter) -> None:
        """Swaps adapters; the base model is loaded once."""
        from vllm.lora.request import LoRARequest

        if self._settings.lora_rank == 0:
            raise ValueError(f"adapter {adapter.directory}: this engine takes none; wants lora_rank = {adapter.rank}")
        if adapter.rank > self._settings.lora_rank:
            raise ValueError(
                f"adapter {adapter.directory}: rank {adapter.rank}, above lora_rank {self._settings.lora_rank}"
            )
        if self._base is not None and self._base.resolve() != adapter.base.resolve():
            raise ValueError(f"adapter {adapter.directory} is for base {adapter.base}, this engine holds {self._base}")
        adapter.check_fits(self._layout if self._base is not None else read_layout(adapter.base))
        if self._base is None:
            self._load_weights(adapter.base)
            self._base = adapter.base
        self._version, engine = None, self.held()
        number = 1 if self._adapter is None else self._adapter.lora_int_id + 1
        request = LoRARequest(f"{version.model}-{version.number}-{version.call}", number, str(adapter.directory))
        try:
            if self._adapter is not None:
                engine.remove_lora(self._adapter.lora_int_id)
            if not engine.add_lora(request):
                raise RuntimeError("vLLM did not take it")
        except Exception as error:
            raise ReplicaBroken(f"adapter {adapter.directory} could not be loaded: {error}") from error
        self._adapter, self._version = request, version
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        """Empties the prefix cache: what it holds was computed with the weights before. vLLM does not do it."""
        engine, deadline_s = self.held(), time.monotonic() + _IDLE_S
        while not engine.reset_prefix_cache():
            if time.monotonic() > deadline_s:
                raise ReplicaBroken("the prefix cache could not be emptied after a weight update: blocks are in use")
            engine.step()

    # --- samples ---------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], sampling: Sampling, stop: Callable[[], bool]) -> Iterator[Sample]:
        if self._version is None:
            raise ValueError("generate before load: the engine holds no policy")
        engine, number = self.held(), self._version.number
        model = engine.vllm_config.model_config
        check_requests(requests, sampling, model.max_model_len, model.get_vocab_size())
        if any(request.cache is not None for request in requests):
            check_caches(requests, self.cache_layout)
        self.stats = EngineStats()
        queue = deque[tuple[Request, int]]()
        for request, key in zip(requests, _keys(requests, sampling), strict=True):
            if len(request.response) >= sampling.max_response_length:
                yield unchanged(request, Finish.LENGTH, number)
            else:
                queue.append((request, key))
        del requests  # the memory of keys and values that came with them is free when they are in their blocks
        states = engine.output_processor.request_states
        open_requests: dict[str, Request] = {}
        named: dict[str, str] = {}
        starting: list[Any] = []
        moved: dict[str, int] = {}
        try:
            while (queue or open_requests) and not stop():
                for name, request in self._admit(queue, sampling, moved):
                    open_requests[name] = request
                    named[states[name].external_req_id] = name
                    starting.append(states[name])
                begun_s = time.perf_counter()
                outputs = _step(engine)
                waiting = [state for state in starting if state.is_prefilling]
                self._count_step(starting, waiting, len(open_requests), moved, time.perf_counter() - begun_s)
                for state in starting:
                    if not state.is_prefilling and state.request_id in moved:
                        open_requests[state.request_id] = replace(open_requests[state.request_id], cache=None)
                starting = waiting
                for output in outputs:
                    request, completion = open_requests.pop(named[output.request_id]), output.outputs[0]
                    if completion.finish_reason not in ("stop", "length"):
                        raise ReplicaBroken(f"vLLM ended sample {request.number} with {completion.finish_reason!r}")
                    finish = Finish.STOP if completion.finish_reason == "stop" else Finish.LENGTH
                    yield _sample(request, completion.token_ids, completion.logprobs, finish, number)
            for name, request in open_requests.items():
                state = states[name]
                tokens, logprobs = state.detokenizer.output_token_ids, state.logprobs_processor.logprobs
                sample = _sample(request, tokens, logprobs, Finish.UNFINISHED, number)
                computed = len(request.prompt) + len(sample.response) - 1
                yield replace(sample, cache=self._cache().take(name, computed) if tokens else request.cache)
            for request, _ in queue:
                yield unchanged(request, Finish.UNFINISHED, number)
        finally:
            if open_requests:
                engine.abort_request(list(open_requests), internal=True)

    def _admit(
        self, queue: deque[tuple[Request, int]], sampling: Sampling, moved: dict[str, int]
    ) -> Iterator[tuple[str, Request]]:
        """Gives vLLM what is next in the queue, with its name there: all of it, but one whose keys and values come
        along when it can start at once. Until then its blocks would be in the way, or be lost to others."""
        if not queue:
            return
        engine, cache = self.held(), self._cache()
        running, waiting = cache.counts()
        room = cache.room
        while queue and not waiting:
            request, key = queue[0]
            needed = cache.needed(len(request.prompt) + len(request.response))
            if request.cache is not None and running and (running >= self._settings.slots or needed > room):
                return
            queue.popleft()
            running, room = running + 1, room - needed
            tokens = np.concatenate((request.prompt, request.response)).tolist()
            params = self._params(sampling, key, len(request.response))
            prompt = {"type": "token", "prompt_token_ids": tokens}
            name = engine.add_request(str(request.number), prompt, params, lora_request=self._adapter)
            yield name, request
            if request.cache is not None:
                begun_s = time.perf_counter()
                moved[name] = cache.give(name, request.cache)
                self.stats = self.stats.plus(moved_s=time.perf_counter() - begun_s)

    def _params(self, sampling: Sampling, key: int, given: int) -> Any:
        """`given` response tokens are in the prompt already."""
        if sampling.stop or sampling.banned:
            raise ValueError(
                "stop strings and bad words: engine 'vllm' has no text here, 'torch' and 'transformers' do"
            )
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from functions.generate.vllm.worker import STREAM

        stream: dict[str, Any] = {"extra_args": {STREAM: [key, given]}}
        if not _on_cpu():
            positioned = self.held().vllm_config.use_v2_model_runner
            stream = {"seed": (key if positioned else key + given) >> 1}
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            max_tokens=sampling.max_response_length - given,
            stop_token_ids=[*([] if sampling.ignore_eos else self._eos), *sampling.stop_token_ids],
            ignore_eos=sampling.ignore_eos,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **stream,
        )

    def _count_step(
        self, starting: list[Any], waiting: list[Any], running: int, moved: dict[str, int], seconds: float
    ) -> None:
        """A step that ends a prompt's prefill counts as prefill, its decoding included; any other as decoding.

        `running` samples were open before the step, of which `starting` had no token; `waiting` still have none. vLLM
        counts the tokens that were `moved` as found in its cache."""
        begun = len(starting) - len(waiting)
        if begun == 0:
            self.stats = self.stats.plus(decode_tokens=running - len(waiting), decode_steps=1, decode_s=seconds)
            return
        ready = [state for state in starting if not state.is_prefilling]
        found = sum(state.num_cached_tokens for state in ready)
        came = sum(min(moved.get(state.request_id, 0), state.num_cached_tokens) for state in ready)
        self.stats = self.stats.plus(
            prefill_tokens=sum(state.prompt_len for state in ready) - found,
            shared_tokens=found - came,
            moved_tokens=came,
            decode_tokens=running - len(starting),
            prefill_s=seconds,
        )

    @property
    def cache_layout(self) -> CacheLayout | str:
        return "the engine holds no policy" if self._blocks is None else self._blocks.layout

    def park(self, weights: Path | None) -> None:
        """vLLM's sleep mode: level 1 keeps weights in host memory, level 2 drops them, to be read from their files
        again. A CPU has none: there its worker does the same (worker.py)."""
        if _on_cpu():
            self.held().collective_rpc("rlhf_park")
        else:
            kept = self._settings.lora_rank or (weights is not None and (weights / SOURCE).is_file())
            self._files = None if kept else weights
            self.held().sleep(level=1 if self._files is None else 2)

    def unpark(self) -> None:
        if _on_cpu():
            self.held().collective_rpc("rlhf_unpark")
        else:
            self.held().wake_up()
            if self._files is not None:  # after level 2 vLLM samples from whatever lies there (vllm#29341)
                self.held().collective_rpc("rlhf_reload", args=(str(self._files),))
        self.forget_prefixes()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.engine_core.shutdown()
        self._engine, self._blocks, self._version, self._adapter = None, None, None, None

    def held(self) -> LLMEngine:
        """vLLM's engine, once a model is loaded."""
        assert self._engine is not None
        return self._engine

    def _cache(self) -> BlockCache:
        assert self._blocks is not None
        return self._blocks


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _step(engine: LLMEngine) -> list[Any]:
    """Outputs of one step. An engine that failed in a step has lost count of its blocks and requests."""
    try:
        return list(engine.step())
    except Exception as error:
        raise ReplicaBroken(f"vLLM failed while it sampled: {type(error).__name__}: {error}") from error


def _keys(requests: Sequence[Request], sampling: Sampling) -> list[int]:
    group = np.array([r.group for r in requests], np.int64)
    index = np.array([r.index for r in requests], np.int64)
    return [int(key) for key in stream_keys(sampling.seed, group, index)]


def _sample(request: Request, tokens: Any, logprobs: Any, finish: Finish, version: int) -> Sample:
    """`logprobs` is vLLM's flat list: one value a token."""
    return Sample(
        request.number,
        np.concatenate((request.response, np.array(tokens, np.int32))),
        np.concatenate((request.logprobs, np.array(logprobs.logprobs, np.float32))),
        finish,
        version,
    )
