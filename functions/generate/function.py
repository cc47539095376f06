"""The generate function: operation `generate`.

inputs   samples (SampleBatch, unfinished: responses empty, or as far as a cut let them come)
         caches (keys and values of these, as far as there are any: moves.py)
weights  policy
params   GenerateParams
events   samples   ref SampleBatch of finished samples, `chunk` or more of them except at the end and after `chunk_s`
         cut       after a cut, `cut_parts` at most: ref SampleBatch of unfinished samples, with what they have
         (both with data {"group", "index", "prompt_length", "length", "finish"}: one number per sample; of a cut, and
         with keep_from, also "caches": for each sample the refs of its keys and values, under caches/<call id>/; none
         where it has none)
done     data: the counts of EngineStats (moved_s with the reading), "engine" that ran and "why" it, "cache" where
         samples that were cut are computed again instead of moved: how many, and why; "load_s" (server/preload.py)
ahead    as a replica starts, it loads the policy that its function's hint names
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from functions.base.samples import Finish, Ragged, SampleBatch
from functions.base.wire import Call, Event, Load
from functions.call.function import Context, FatalError
from functions.call.params import parse
from functions.generate import moves
from functions.generate.engine.base import Request, Sample, Sampling
from functions.generate.engines import ENGINES, EngineOptions
from functions.generate.policy import HeldPolicy
from functions.generate.vllm.start import VllmSettings
from functions.models.pretrained import pick_device, pick_dtype


@dataclass(frozen=True)
class GenerateParams(Sampling):
    """What is sampled from (engine/base.py), and in which parts it is handed over."""

    chunk: int = 16
    """Finished samples that are worth an event,"""
    chunk_s: float = math.inf
    """and seconds after which fewer are, when another one finishes."""
    cut_parts: int = 1
    """Parts that unfinished samples are handed back in after a cut, about alike."""

    def __post_init__(self) -> None:
        if self.max_response_length < 1:
            raise ValueError(f"max_response_length is {self.max_response_length}, wants 1 or more")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}, wants 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, wants more than 0 and at most 1")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}, wants 0 (all tokens) or more")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p is {self.min_p}, wants at least 0 and less than 1")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}, wants more than 0 (1: none)")
        if "" in self.stop or () in self.banned:
            raise ValueError("stop and banned want no empty ones")
        if self.chunk < 1:
            raise ValueError(f"chunk is {self.chunk}, wants 1 or more")
        if self.cut_parts < 1:
            raise ValueError(f"cut_parts is {self.cut_parts}, wants 1 or more")


class GenerateFunction:
    """Keeps the engine, and the version that it holds, between calls; a next version comes as a delta where it can.

    `deterministic`: the same sample whatever else is in the batch, bit for bit (CPU, one thread).
    `vllm`: settings of the vLLM engine (VllmSettings: context, kv_cache_mb, memory_fraction, lora_rank, gpus, eager).
    With engine = "vllm" and a lora_rank, adapters are swapped over their base; else they are merged into its weights.
    """

    def __init__(
        self, *, engine: str = "auto", dtype: str = "float32", device: str = "auto", threads: int | None = None,
        slots: int = 64, deterministic: bool = False, vllm: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        if engine not in ENGINES:
            raise ValueError(f"engine {engine!r}: wants one of {', '.join(ENGINES)}")
        if slots < 1:
            raise ValueError(f"slots is {slots}, wants 1 or more")
        if deterministic and threads not in (None, 1):
            raise ValueError(f"threads is {threads} with deterministic = true, which wants 1")
        where = pick_device(device)
        if deterministic and where.type != "cpu":
            raise ValueError(f"deterministic generation runs on device 'cpu', not {device!r} ({where})")
        if deterministic or threads is not None:
            torch.set_num_threads(1 if deterministic else threads or 1)
        VllmSettings(**(vllm or {}))  # refuses unknown names and impossible values
        self.deterministic = deterministic
        self.policy = HeldPolicy(engine, EngineOptions(pick_dtype(dtype), where, slots, deterministic, vllm or {}))

    def load_ahead(self, load: Load, context: Context) -> None:
        if load.operation != "generate" or "policy" not in load.weights:
            raise FatalError("the generate function loads for operation 'generate', with weights.policy")
        self.policy.hold(load.weights["policy"], context)

    def park(self) -> int | None:
        return self.policy.park()

    def unpark(self) -> None:
        self.policy.unpark()

    def call(self, call: Call, context: Context) -> Iterator[Event]:
        if call.operation != "generate":
            raise FatalError(f"the generate function has no operation {call.operation!r}; it has: generate")
        params = parse(GenerateParams, call.params, "params of generate")
        if "policy" not in call.weights:
            raise FatalError("generate wants the version to sample from as weights.policy")
        with context.phase("read"):
            batch = _read(call, context)
        prior = [event for event in context.prior if event.kind == "samples"]
        done = {key for event in prior for key in zip(event.data["group"], event.data["index"], strict=True)}
        left = [row for row, key in enumerate(batch.keys) if key not in done]
        with context.loading.timed():
            engine, choice = self.policy.hold(call.weights["policy"], context)
        if self.deterministic and choice.name == "transformers" and not batch.mask.all():
            raise FatalError(
                "an environment in a deterministic job wants the torch engine, which does not know this model"
            )
        if params.routed_experts and choice.name != "transformers":
            raise FatalError(f"engine {choice.name!r} does not say which experts it chose, 'transformers' does")
        writer = _Writer(call, context, batch, len(prior))
        inbox = moves.read(call, context, engine, _requests(batch, left))
        outbox = moves.Outbox(call, context, batch.keys)
        finished: list[Sample] = []
        cut: list[Sample] = []
        counted, since_s = len(done), 0.0

        def stop() -> bool:
            context.check()
            return context.cut_requested()

        try:
            with context.phase("generate"), _fatal_value_errors():
                for sample in engine.generate(inbox.hand_over(), params, stop):
                    if sample.finish == Finish.UNFINISHED:
                        cut.append(outbox.add(sample))
                    else:
                        since_s = since_s if finished else time.monotonic()
                        finished.append(outbox.add(sample))
                    if len(finished) >= params.chunk or (finished and time.monotonic() - since_s >= params.chunk_s):
                        counted += len(finished)
                        context.progress({"finished": counted, "samples": len(batch)})
                        yield writer.samples(finished, outbox)
                        finished = []
            if finished:
                yield writer.samples(finished, outbox)
        finally:
            outbox.close()
        for part in range(min(params.cut_parts, len(cut))):
            yield writer.cut(cut[part :: params.cut_parts], part, outbox)
        stats = dataclasses.replace(engine.stats, moved_s=engine.stats.moved_s + inbox.read_s)
        chosen = {"engine": choice.name, "why": choice.why}
        again = [text for text in (inbox.missing, outbox.missing(engine, cut)) if text]
        said = {"cache": f"computed again: {'; '.join(again)}"} if again else {}
        yield Event("done", data={**dataclasses.asdict(stats), **chosen, **said, **context.loading.stats()})


@contextlib.contextmanager
def _fatal_value_errors() -> Iterator[None]:
    """What an engine says of a request that does not fit."""
    try:
        yield
    except ValueError as error:
        raise FatalError(str(error)) from error


def _read(call: Call, context: Context) -> SampleBatch:
    """The call's samples. Raises FatalError for none, a finished one, one given twice, or one begun by another
    version than the call's."""
    refs = call.inputs.get("samples", ())
    if not refs:
        raise FatalError(f"call {call.id}: generate wants inputs 'samples'")
    batch = SampleBatch.concat([SampleBatch.decode(context.exchange.get(ref)) for ref in refs])
    seen: set[tuple[int, int]] = set()
    number = call.weights["policy"].number
    for row, key in enumerate(batch.keys):
        who = f"call {call.id}: sample (group {key[0]}, index {key[1]})"
        if key in seen:
            raise FatalError(f"{who} is given twice")
        if batch.finish[row] != Finish.UNFINISHED:
            raise FatalError(f"{who} is finished already ({Finish(int(batch.finish[row])).name})")
        if batch.responses.lengths[row] and batch.version[row] != number:
            raise FatalError(f"{who} was begun by version {batch.version[row]}; the call's policy is {number}")
        seen.add(key)
    return batch


def _requests(batch: SampleBatch, rows: Sequence[int]) -> list[Request]:
    """`number` is the row in the batch."""
    prompts, responses = batch.prompts.rows(), batch.responses.rows()
    logprobs = Ragged(batch.logprobs, batch.responses.lengths).rows()
    experts = None if batch.experts is None else Ragged(batch.experts, batch.responses.lengths).rows()
    return [
        Request(
            row, int(batch.group[row]), int(batch.index[row]), prompts[batch.prompt[row]], responses[row],
            logprobs[row], experts=None if experts is None else experts[row],
        )
        for row in rows
    ]  # fmt: skip


@dataclass
class _Writer:
    """Puts samples into the exchange and names them in events."""

    call: Call
    context: Context
    batch: SampleBatch
    written: int

    def samples(self, samples: Sequence[Sample], outbox: moves.Outbox) -> Event:
        self.written += 1
        event = self._put("samples", f"samples.{self.written - 1:04d}", samples)
        return _with_caches(event, samples, outbox) if self.call.params.get("keep_from") is not None else event

    def cut(self, samples: Sequence[Sample], part: int, outbox: moves.Outbox) -> Event:
        return _with_caches(self._put("cut", f"unfinished.{part:04d}", samples), samples, outbox)

    def _put(self, kind: Literal["samples", "cut"], name: str, samples: Sequence[Sample]) -> Event:
        before = self.batch.select([sample.number for sample in samples])
        masks = Ragged(before.mask, before.responses.lengths).rows()
        experts = [sample.experts for sample in samples if sample.experts is not None]  # others have no token yet
        batch = dataclasses.replace(
            before,
            responses=Ragged.from_rows([s.response for s in samples], np.int32),
            logprobs=np.concatenate([s.logprobs for s in samples]),
            mask=np.concatenate([_mask(mask, s) for mask, s in zip(masks, samples, strict=True)]),
            finish=np.array([s.finish for s in samples], np.int32),
            version=np.array([s.version for s in samples], np.int32),
            experts=np.concatenate(experts) if experts else None,
        )
        with self.context.phase("publish"):
            ref = self.context.exchange.put(f"{self.call.prefix}{name}", batch.encode())
        return Event(kind, ref, batch.about)


def _with_caches(event: Event, samples: Sequence[Sample], outbox: moves.Outbox) -> Event:
    caches = [[ref.to_json() for ref in outbox.refs(sample.number)] for sample in samples]
    return dataclasses.replace(event, data={**event.data, "caches": caches})


def _mask(before: npt.NDArray[np.float32], sample: Sample) -> npt.NDArray[np.float32]:
    """Tokens that came with the request keep their mask; those that were sampled train."""
    return np.append(before, np.ones(len(sample.response) - len(before), np.float32)).astype(np.float32)
