"""Operations `logprobs` and `values`: what a frozen model says about every response token of finished samples.

As a replica starts, it loads the models that its function's hint names (functions/server/preload.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from functions.base.samples import Columns, Float, SampleBatch
from functions.base.wire import Call, Event, Load, Version
from functions.call.function import Context, FatalError
from functions.call.inputs import read_samples, sample_name
from functions.call.params import parse
from functions.models.forward import Head, output_head, pack_logprobs, pack_topk, pack_values, shares_prefix
from functions.models.packing import Pack, make_packs
from functions.models.pretrained import micro_batch_default, pick_device, pick_dtype
from functions.models.team import Member, Team, park, unpark
from functions.models.tensor_parallel import TokenShare
from functions.weights.local_copy import LocalCopy


@dataclass(frozen=True, kw_only=True)
class LogprobParams:
    """Params of `logprobs`: ln p of each response token at `temperature`, as token column `column`.

    top_k   above 0: also those of its most probable tokens, as "teacher_logprobs" [tokens, K], and their numbers, as
            "teacher_ids" (float32, exact below 2^24)
    """

    temperature: float = 1.0
    column: str = "ref_logprobs"
    top_k: int = 0
    micro_batch_tokens: int | None = None
    """Computed tokens per forward pass; None: 1024 on a CPU, 16384 on a GPU."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature: got {self.temperature}, wants a number above 0")
        if self.top_k < 0:
            raise ValueError(f"top_k: got {self.top_k}, wants 0 (none) or a number of tokens")


@dataclass(frozen=True, kw_only=True)
class ValueParams:
    """Params of `values`: the critic's value before each response token, as token column `column`."""

    column: str = "values"
    micro_batch_tokens: int | None = None


@dataclass(frozen=True)
class _Held:
    model: PreTrainedModel
    head: Head | None
    """None for a critic."""


Key = tuple[str, Version]
"""The operation, and the version that it asks."""


def _keep(member: Member, kept: Sequence[Key]) -> None:
    member.held = {other: member.held[other] for other in kept}


def _hold(member: Member, key: Key, kept: Sequence[Key], directory: Path, dtype: torch.dtype) -> None:
    """Loads the model of `key` from `directory`, beside those that are `kept`. ValueError where there is none."""
    _keep(member, kept)
    model = member.load("causal" if key[0] == "logprobs" else "critic", directory, dtype)
    member.held[key] = _Held(model, output_head(model) if key[0] == "logprobs" else None)


@torch.no_grad()
def _said(member: Member, key: Key, pack: Pack, temperature: float, top_k: int) -> tuple[Tensor, ...]:
    """Of each response token of the pack the log-probability, or value [N]; with `top_k` as pack_topk."""
    held, pack = member.held[key], pack.to(member.device)
    if held.head is None:
        return (pack_values(held.model, pack),)
    tokens = None if member.mesh is None else TokenShare.of(pack, member.mesh)
    own = pack if tokens is None else tokens.pack(pack)
    found: tuple[Tensor, ...]
    if top_k:
        found = pack_topk(held.model, held.head, own, temperature, top_k)
    else:
        found = pack_logprobs(held.model, held.head, own, temperature)[:1]
    return found if tokens is None else tokens.gather(found)


class ReferenceFunction:
    """Holds the models it was asked for last; a version that it does not hold is fetched."""

    def __init__(
        self, *, device: str = "auto", dtype: str = "float32", threads: int | None = None, models: int = 2, tp: int = 1
    ) -> None:
        """`models`: how many versions are held at once (a reference and a critic by default); `tp`: on how many devices
        of this replica."""
        try:
            self._device, self._dtype = pick_device(device), pick_dtype(dtype)
        except ValueError as error:
            raise FatalError(str(error)) from error
        if threads is not None:
            torch.set_num_threads(threads)
        self._capacity = models
        self._team = Team(tp, self._device)
        self._critics: dict[str, LocalCopy] = {}
        """By model: critics are trained beside the policy, and their next versions may come as deltas."""

    def load_ahead(self, load: Load, context: Context) -> None:
        if load.operation not in ("logprobs", "values") or "model" not in load.weights:
            raise FatalError("the reference function loads for operations logprobs and values, with weights.model")
        self._model(load.operation, load.weights["model"], context)

    def park(self) -> int | None:
        self._team(park)
        return max((version.number for _, version in self._team.member.held), default=None)

    def unpark(self) -> None:
        self._team(unpark)

    def close(self) -> None:
        """Ends the ranks of this replica; the next call starts them again."""
        self._team.close()

    def call(self, call: Call, context: Context) -> Iterator[Event]:
        if call.operation == "logprobs":
            logprob_params = parse(LogprobParams, call.params, "params")
            column, budget, temperature, top_k = (
                logprob_params.column, logprob_params.micro_batch_tokens, logprob_params.temperature,
                logprob_params.top_k,
            )  # fmt: skip
        elif call.operation == "values":
            value_params = parse(ValueParams, call.params, "params")
            column, budget, temperature, top_k = value_params.column, value_params.micro_batch_tokens, 1.0, 0
        else:
            raise FatalError(f"operation {call.operation!r}: the reference function knows logprobs and values")
        if "model" not in call.weights:
            raise FatalError(f"call {call.id}: operation {call.operation!r} wants weights 'model'")
        with context.phase("read"):
            batch = read_samples(call, context.exchange)
        with context.loading.timed():
            key = self._model(call.operation, call.weights["model"], context)
        with context.phase("forward"):
            values, stats, top = self._compute(key, batch, budget, temperature, context, top_k)
        columns = Columns.of(batch, token={column: values.numpy(), **top})
        with context.phase("publish"):
            ref = context.exchange.put(f"{call.prefix}{column}", columns.encode())
        yield Event("done", ref, {**stats, **context.loading.stats()})

    def _compute(
        self, key: Key, batch: SampleBatch, budget: int | None, temperature: float, context: Context, top_k: int
    ) -> tuple[Tensor, dict[str, int], dict[str, Float]]:
        held: _Held = self._team.member.held[key]
        shared = shares_prefix(held.model.config, int(batch.token_counts.max()))
        try:
            packs = make_packs(
                batch, range(len(batch)), budget_tokens=budget or micro_batch_default(self._device), shared=shared
            )
        except ValueError as error:
            raise FatalError(str(error)) from error
        result = torch.zeros(int(batch.responses.lengths.sum()))
        top_k = top_k if held.head is None else min(top_k, held.head.weight.shape[0])
        top = {name: torch.zeros((*result.shape, top_k)) for name in ("teacher_logprobs", "teacher_ids") if top_k}
        computed = 0
        for number, pack in enumerate(packs):
            context.check()
            context.progress({"packs": number, "of": len(packs)})
            part, *most = self._team(_said, key, pack, temperature, top_k)
            for column, values in zip(top.values(), most, strict=True):
                column[pack.flat] = values.float().cpu()
            result[pack.flat] = part.cpu()
            computed += pack.tokens.numel()
        bad = (~torch.isfinite(result)).nonzero()
        if len(bad):
            token = int(bad[0, 0])
            row = int((torch.from_numpy(batch.responses.offsets) <= token).sum()) - 1
            raise FatalError(f"{sample_name(batch, row)}: {float(result[token])} at one of its response tokens")
        stats = {
            "packs": len(packs),
            "computed_tokens": computed,
            "samples": len(batch),
            "tokens": int(batch.token_counts.sum()),
            "shared_prefix": shared,
        }
        return result, stats, {name: values.numpy() for name, values in top.items()}

    def _model(self, operation: str, version: Version, context: Context) -> Key:
        key, held = (operation, version), self._team.member.held
        if key in held:
            held[key] = held.pop(key)  # the latest used is last
            return key
        kept = list(held)
        if operation == "values":  # the critic before it is of no more use, and its files are about to change
            kept = [other for other in kept if (other[0], other[1].model) != (operation, version.model)]
            self._team(_keep, kept)
        kept = kept[max(0, len(kept) + 1 - self._capacity) :]
        copy = LocalCopy(Path(context.scratch) / "reference")
        if operation == "values":
            root = Path(context.scratch) / "critics" / version.model
            copy = self._critics.setdefault(version.model, LocalCopy(root))
        try:
            directory = copy.bring(context.exchange, version, context.phase).directory
            with context.phase("load"):
                self._team(_hold, key, kept, directory, self._dtype)
        except ValueError as error:
            copy.drop()
            raise FatalError(str(error)) from error
        if operation == "values":
            copy.settle()
        else:
            copy.drop()
        return key
