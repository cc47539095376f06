"""Operation `train`: samples and columns in, the next version of the model out, exactly once.

    read -> filter -> [old log-probabilities] -> advantages
         -> epochs x mini-batches of (accumulate over packs, clip, AdamW) -> publish
The result is a function of weights, optimizer state, samples, columns and params alone: samples are sorted first, and
a warm replica computes on the numbers that a cold one loads. A call whose version is published is not trained again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from functions.algorithms.metrics import combine_metrics
from functions.exchange.base import NotFound
from functions.forward import shares_prefix
from functions.function import Context, FatalError
from functions.inputs import read_columns, read_samples
from functions.models import micro_batch_default, pick_device
from functions.packing import Pack, make_packs
from functions.samples import SampleBatch
from functions.train.batch import Targets, TrainBatch, build, targets
from functions.train.gang import ALONE, GangParams, Ranks, meet
from functions.train.parallel import Share, share
from functions.train.params import TrainParams
from functions.train.state import Structure, TrainState, load, publish_state
from functions.train.step import Check, accumulate, batch_logprobs, blame, totals_of
from functions.weights.manifest import Manifest, label, read_manifest
from functions.wire import Call, Event, Version


class TrainFunction:
    """Holds the version that it trained last; a call for any other loads what it needs from the exchange."""

    def __init__(self, *, device: str = "auto", threads: int | None = None) -> None:
        try:
            self._device = pick_device(device)
        except ValueError as error:
            raise FatalError(str(error)) from error
        if threads is not None:
            torch.set_num_threads(threads)
        self._held: TrainState | None = None

    def call(self, call: Call, context: Context) -> Iterator[Event]:
        if call.operation != "train":
            raise FatalError(f"operation {call.operation!r}: the train function knows train")
        if "policy" not in call.weights:
            raise FatalError(f"call {call.id}: operation 'train' wants weights 'policy', the version to improve")
        params = TrainParams.from_json({key: value for key, value in call.params.items() if key != "gang"})
        gang = GangParams.of(call.params)
        identity = call.id if gang is None else gang.id
        parent = call.weights["policy"]
        version = Version(params.model, parent.number + 1, hashlib.sha256(identity.encode()).hexdigest()[:12])
        manifest = _published(context, version)
        if manifest is None and gang is None:
            manifest = self._train(call, params, parent, version, context, ALONE)
        elif manifest is None and gang is not None:
            with meet(gang, self._device, context, lambda: _published(context, version) is not None) as ranks:
                if ranks is None:
                    manifest = read_manifest(context.exchange, version)
                else:
                    manifest = self._train(call, params, parent, version, context, ranks)
        assert manifest is not None
        yield Event("done", None, {"version": version.to_json(), **manifest.trainer["result"]})

    def _train(
        self, call: Call, params: TrainParams, parent: Version, version: Version, context: Context, ranks: Ranks
    ) -> Manifest:
        samples = _without(read_samples(call, context.exchange), params)
        batch = build(samples, read_columns(call, samples, context.exchange), params)
        held, self._held = self._held, None  # what fails half-way is not held on to
        warm = held is not None and held.version == parent and held.structure == Structure.of(params)
        alone = ranks.mesh is None  # a gang's shards are of no use to another gang
        state = held if warm and alone and held is not None else load(parent, params, context, self._device, ranks)
        try:
            metrics, stats, carry = optimize(state, batch, params, context)
        except (FatalError, ValueError) as error:
            raise FatalError(f"step {call.step}, weights {label(parent)}: {error}") from error
        context.check()
        result = {"metrics": metrics, "stats": stats}
        manifest = publish_state(state, version, carry, {"result": result}, context)
        if alone and manifest.trainer["result"] == result:  # else another attempt won, with other bits
            self._held = replace(state, version=version, carry=carry)
        return manifest


def optimize(
    state: TrainState, batch: TrainBatch, params: TrainParams, context: Context
) -> tuple[dict[str, float], dict[str, int], dict[str, float]]:
    """Improves `state` in place; (metrics, stats, carry). FatalError or ValueError: it must not be used any more."""
    model, prefix = state.model, "actor" if params.objective == "policy" else "critic"
    model.train()
    if params.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()
    try:
        lengths = batch.samples.prompts.lengths[batch.samples.prompt] + batch.samples.responses.lengths
        shared = shares_prefix(model.config, int(lengths.max()))
        progress = _Progress(context)

        def share_of(rows: Sequence[int]) -> Share:
            def packs_of(budget_tokens: int) -> list[Pack]:
                return make_packs(batch.samples, rows, budget_tokens=budget_tokens, shared=shared)

            budget = params.micro_batch_tokens or micro_batch_default(model.device)
            return share(packs_of, budget, state.ranks.rank, state.ranks.size)

        old = _old_logprobs(state, batch, params, share_of(batch.trained_rows()), progress)
        goal = targets(batch, params, old, state.carry)
        if old is not None and params.objective == "policy":
            _check_mismatch(batch, old, params)
        parts, computed = list[dict[str, float]](), 0
        for epoch in range(params.epochs):
            for number, rows in enumerate(mini_batches(batch, params.mini_batches)):
                own = share_of(rows)
                computed += own.tokens
                progress.stage(f"epoch {epoch + 1}, mini-batch {number + 1}", len(own.packs))
                parts.append(_one_step(state, own, rows, batch, goal, old, params, progress))
    finally:
        model.train(False)
    metrics = {name: _over_steps(name, parts) for name in parts[0]} | goal.metrics
    metrics[f"{prefix}/lr"] = parts[-1][f"{prefix}/lr"]
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    stats = {
        "non_finite_metrics": len(metrics) - len(finite),  # a perplexity may overflow; JSON has no form for it
        "optimizer_steps": len(parts),
        "ranks": state.ranks.size,
        "packs": own.count,
        "computed_tokens": computed,
        "tokens": int(lengths.sum()) * params.epochs,
        "shared_prefix": int(shared),
        "samples": batch.count,
        "trained_samples": len(batch.trained_rows()),
    }
    return finite, stats, goal.carry


def _one_step(
    state: TrainState,
    own: Share,
    rows: Sequence[int],
    batch: TrainBatch,
    goal: Targets,
    old: Tensor | None,
    params: TrainParams,
    check: Check,
) -> dict[str, float]:
    optimizer, prefix = state.optimizer, "actor" if params.objective == "policy" else "critic"
    totals = totals_of(batch, rows, params)

    def add(some: Share) -> list[dict[str, Tensor]]:
        return accumulate(state.forward, some, batch, goal, old, totals, params, check)

    optimizer.zero_grad()
    metrics = combine_metrics(state.ranks.gather(combine_metrics(add(own))))
    if old is None and params.objective == "policy":
        _check_bound(metrics["rollout_corr/abs_diff_mean"], batch, params)
    norm = optimizer.grad_norm()
    if not math.isfinite(float(norm)):
        if state.ranks.size > 1:
            raise FatalError(f"gradient norm is {float(norm)}; with one replica the message names sample and parameter")

        def gradients(pack: Pack) -> Iterator[tuple[str, Tensor]]:
            optimizer.zero_grad()
            add(Share((pack,), 0, 1, pack.tokens.numel()))
            return ((name, p.grad) for name, p in optimizer.named.items() if p.grad is not None)

        raise FatalError(f"gradient norm is {float(norm)}: {blame(gradients, own.packs, batch)}")
    metrics[f"{prefix}/grad_norm"] = float(norm)
    metrics[f"{prefix}/lr"] = optimizer.step(params.optimizer, norm)
    return metrics


def mini_batches(batch: TrainBatch, count: int) -> list[list[int]]:
    """The trained samples in `count` parts of whole prompts (fewer when there are fewer prompts), in their order."""
    rows = batch.trained_rows()
    groups = list(dict.fromkeys(int(batch.samples.group[row]) for row in rows))
    parts = [set(part.tolist()) for part in np.array_split(np.array(groups), min(count, len(groups)))]
    return [[row for row in rows if int(batch.samples.group[row]) in part] for part in parts]


def _old_logprobs(
    state: TrainState, batch: TrainBatch, params: TrainParams, own: Share, progress: _Progress
) -> Tensor | None:
    """Log-probabilities of the weights before the step, where they are needed before it or differ within it."""
    if "old_logprobs" in batch.token or not state.forward.policy:
        return batch.token.get("old_logprobs")
    in_reward = params.kl is not None and params.kl.where == "reward"
    if params.epochs * params.mini_batches == 1 and not in_reward and params.advantage != "distillation":
        return None
    progress.stage("old log-probabilities", len(own.packs))
    return state.ranks.sum(batch_logprobs(state.forward, own, batch, params, progress))


def _check_mismatch(batch: TrainBatch, old: Tensor, params: TrainParams) -> None:
    difference = (old - batch.rollout_logprobs).abs()[batch.mask == 1]
    _check_bound(float(difference.double().mean()), batch, params)


def _check_bound(mean: float, batch: TrainBatch, params: TrainParams) -> None:
    bound = params.max_rollout_logprob_diff
    if bound is not None and not mean <= bound:
        made_by = ", ".join(map(str, sorted(set(batch.samples.version.tolist()))))
        raise FatalError(
            f"rollout log-probabilities differ from this version's by {mean:.3g} on average, "
            f"max_rollout_logprob_diff is {bound:.3g}; "
            f"the samples say that version {made_by} made them: stale weights?"
        )


def _over_steps(name: str, parts: list[dict[str, float]]) -> float:
    values = [part[name] for part in parts if name in part]
    if name.endswith("max"):
        return max(values)
    return min(values) if name.endswith("min") else sum(values) / len(values)


def _published(context: Context, version: Version) -> Manifest | None:
    try:
        return read_manifest(context.exchange, version)
    except NotFound:
        return None


def _without(samples: SampleBatch, params: TrainParams) -> SampleBatch:
    dropped = set(params.dropped)
    keys = zip(samples.group.tolist(), samples.index.tolist(), strict=True)
    kept = [row for row, key in enumerate(keys) if key not in dropped]
    if not kept:
        raise FatalError("every sample is dropped, nothing is left to train on")
    return samples if len(kept) == len(samples) else samples.select(kept)


class _Progress:
    """The heartbeat's data and the place where a cancelled call ends: called before each pack."""

    def __init__(self, context: Context) -> None:
        self._context, self._data = context, dict[str, Any]()

    def stage(self, name: str, packs: int) -> None:
        self._data = {"stage": name, "of": packs}

    def __call__(self, number: int) -> None:
        self._context.check()
        self._context.progress(self._data | {"packs": number})
