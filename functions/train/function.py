"""Operation `train`: samples and columns in, the next version of the model out, exactly once.

    read -> filter -> [old log-probabilities] -> advantages
         -> epochs x mini-batches of (accumulate over packs, clip, AdamW) -> publish
With a feed (feed.py, streamed.py) the samples come in parts while others are generated. Where a step's gradient is a
sum over prompt groups it begins with the first part; elsewhere only the loading is done beside generation.
The result is a function of weights, optimizer state, samples, columns and params alone: samples are sorted first, and
a warm replica computes on the numbers that a cold one loads. A call whose version is published is not trained again.
"""

import hashlib
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from functions.algorithms.metrics import combine_metrics
from functions.algorithms.truncation import WHOLE
from functions.base.samples import Columns, SampleBatch
from functions.base.wire import Call, Event, Json, Version
from functions.call.function import Context, FatalError
from functions.call.inputs import joined, without
from functions.call.train_params import TrainParams
from functions.exchange.base import NotFound
from functions.models.packing import Pack
from functions.models.parked import HostMemory
from functions.models.pretrained import pick_device
from functions.train.batch import Targets, TrainBatch, after_entropy, build, targets
from functions.train.feed import Feed
from functions.train.fused import run_fused
from functions.train.gang import ALONE, GangParams, Ranks, meet
from functions.train.kept import Kept
from functions.train.measured import memory, rank_tokens, reset_peak, skipped
from functions.train.mismatch import mismatch_columns
from functions.train.parallel import Share
from functions.train.progress import Progress
from functions.train.protocols import Inputs
from functions.train.selection import draw, redrawn, selected
from functions.train.state import Structure, TrainState, lighter, load, publish_state, tensors_of, whole_again
from functions.train.step import Check, Work, batch_logprobs, blame, denominators, truncation, whole_correction
from functions.train.streamed import optimize_streamed, whole_batch
from functions.train.update import (
    check_bound,
    check_versions,
    packed_rows,
    prefix_shared,
    share_of,
    told,
    training,
    update,
)
from functions.weights.manifest import Manifest, label, read_manifest

Model = tuple[Version, TrainParams]
"""What is improved, and how."""
Optimized = tuple[dict[str, float], dict[str, float], dict[str, float]]
"""Metrics, stats, carry."""
Optimizing = Generator[Work, None, Optimized]


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
        self._kept: list[Kept] = []
        """Of a gang, of each model that it trains."""
        self._host = HostMemory()
        self._memory: dict[str, float] = {}
        """What the call at hand has used; none of a call whose version was there."""

    def park(self) -> int | None:
        if self._held is None:
            self._host.park(rows for kept in self._kept for rows in kept.rows.values())
            return self._kept[0].version.number if self._kept else None
        self._held = lighter(self._held)
        self._host.park(tensors_of(self._held))
        return self._held.version.number

    def unpark(self) -> None:
        self._host.unpark()
        if self._held is not None:
            self._held = whole_again(self._held)

    def call(self, call: Call, context: Context) -> Iterator[Event]:
        if call.operation != "train":
            raise FatalError(f"operation {call.operation!r}: the train function knows train")
        if "policy" not in call.weights:
            raise FatalError(f"call {call.id}: operation 'train' wants weights 'policy', the version to improve")
        models, gang, feed = _models(call), GangParams.of(call.params), Feed.of(call.params, context)
        if len(models) > 1 and (feed is not None or gang is None or gang.parallel.pp == 1):
            raise FatalError("params.beside: wants a gang with pp above 1 and all samples as inputs")
        own = call.id if gang is None else gang.id

        def versions() -> list[Version]:
            """What the call makes; of a feed that has not ended nobody knows yet."""
            identity = own if feed is None else feed.identity()
            return [] if identity is None else [_after(parent, params, identity) for parent, params in models]

        def published() -> list[Manifest]:
            """All of them, or none."""
            found = [_published(context, version) for version in versions()]
            return [] if None in found else [manifest for manifest in found if manifest is not None]

        manifests, self._memory = published(), {}
        if not manifests and gang is None:
            manifests = self._train(call, models, feed, versions, context, ALONE)
        elif not manifests and gang is not None:
            with meet(gang, self._device, context, lambda: bool(published())) as ranks:
                manifests = published() if ranks is None else self._train(call, models, feed, versions, context, ranks)
        told, *beside = [
            {"version": made.version.to_json(), **made.trainer["result"], "durable": made.trainer.get("durable", True)}
            for made in manifests
        ]
        waited = {} if feed is None else {"waited_s": feed.waited_s}
        both = {"beside": beside[0]} if beside else {}
        yield Event("done", None, {**told, **both, **waited, "memory": self._memory})

    def _train(
        self, call: Call, models: Sequence[Model], feed: Feed | None, versions: Callable[[], list[Version]],
        context: Context, ranks: Ranks,
    ) -> list[Manifest]:  # fmt: skip
        (parent, params), *beside = models
        batches: list[TrainBatch] = []
        every = [own for _, own in models]
        inputs = Inputs(ranks, every, context.exchange)
        if feed is None:
            with context.phase("read"):
                samples, columns = inputs.read(*(call.inputs.get(name, ()) for name in ("samples", "columns")))
                batches = [_batch(joined(call, samples), columns, own) for own in every]
                del samples, columns
        held, self._held = self._held, None  # what fails half-way is not held on to
        kept, self._kept = self._kept, []
        warm = held is not None and held.version == parent and held.structure == Structure.of(params)
        alone = ranks.mesh is None
        with context.phase("load"):
            state = (
                held
                if warm and alone and held is not None
                else load(parent, params, context, self._device, ranks, kept)
            )
            states = [state, *(load(*other, context, self._device, ranks.turned(), kept) for other in beside)]
        del kept
        loaded = [one.optimizer.steps for one in states]
        try:
            with context.phase("train"):
                reset_peak(self._device)
                if feed is not None and feed.stream:
                    *told, mismatch = optimize_streamed(state, feed.batches(ranks), inputs, params, context)
                    found: list[Optimized] = [(told[0], told[1], told[2])]
                else:
                    if feed is not None:
                        batches = [whole_batch(feed.batches(ranks), inputs, params)]
                    batches = [
                        inputs.filled(batch, partial(packed_rows, one, batch, passes_of(batch, own), own))
                        for one, batch, own in zip(states, batches, every, strict=True)
                    ]
                    del inputs
                    found = (
                        optimize_both(states, batches, every, context)
                        if beside
                        else [optimize(state, batches[0], params, context)]
                    )
                    mismatch = mismatch_columns(batches[:1], ranks)
        except (FatalError, ValueError) as error:
            raise FatalError(f"step {call.step}, weights {label(parent)}: {error}") from error
        except Exception:  # a peer is lost, or the call is over
            if not alone and loaded == [one.optimizer.steps for one in states]:
                self._kept = [Kept.of(one.version, one.structure, one.ranks, one.optimizer) for one in states]
            raise
        context.check()
        self._memory = memory(self._device, ranks)
        made, manifests = versions(), list[Manifest]()
        assert made, "a feed that was read to its end has said what the version is called"
        for (_, own), trained, version, (metrics, stats, carry) in zip(models, states, made, found, strict=True):
            result: Json = {"metrics": metrics, "stats": stats}
            if own.objective == "policy" and ranks.rank == 0:
                put = context.exchange.durable.put(f"{call.prefix}mismatch", mismatch.encode())
                result["mismatch"] = put.to_json()
            with context.phase("publish"):
                manifest, after = publish_state(trained, version, carry, result, context, durable=own.durable_state)
            manifests.append(manifest)
            if after is not None and not alone:
                self._kept.append(Kept.of(version, after.structure, after.ranks, after.optimizer))
        self._held = after if alone else None
        return manifests


def _models(call: Call) -> list[Model]:
    """What the call trains: the policy, or the critic, of its weights; `params.beside`: and the one beside it."""
    given = {key: value for key, value in call.params.items() if key not in ("gang", "feed", "beside")}
    found = [(call.weights["policy"], TrainParams.from_json(given))]
    if "beside" in call.params:
        if "beside" not in call.weights:
            raise FatalError(f"call {call.id}: params.beside wants weights 'beside', the version to improve")
        found.append((call.weights["beside"], TrainParams.from_json(call.params["beside"])))
    return found


def optimize_both(
    states: Sequence[TrainState], batches: Sequence[TrainBatch], params: Sequence[TrainParams], context: Context
) -> list[Optimized]:
    """`optimize` of two models whose pipelines run in opposite directions: step by step in one schedule of both
    (fused.py); what one has more of runs alone. In stats: the most micro-batches that a rank held."""
    works = [optimizing(*one, context) for one in zip(states, batches, params, strict=True)]
    found, most = dict[int, Optimized](), 0
    while len(found) < len(works):
        due = []
        for number in sorted({*range(len(works))} - found.keys()):
            try:
                due.append(next(works[number]))
            except StopIteration as end:
                found[number] = end.value
        if len(due) == 2:
            most = max(most, run_fused(due, states[0].ranks, context))
        else:
            for work in due:
                work.run()
    held = {"held_micro_batches": max(told["most"] for told in states[0].ranks.gather({"most": most}))}
    return [(metrics, stats | held, carry) for _, (metrics, stats, carry) in sorted(found.items())]


def optimize(state: TrainState, batch: TrainBatch, params: TrainParams, context: Context) -> Optimized:
    """Improves `state` in place. FatalError or ValueError: it must not be used any more."""
    steps = optimizing(state, batch, params, context)
    while True:
        try:
            next(steps).run()
        except StopIteration as end:
            found: Optimized = end.value
            return found


def optimizing(state: TrainState, batch: TrainBatch, params: TrainParams, context: Context) -> Optimizing:
    """As `optimize`; what an optimizer step adds up is handed out, to be run before the next is asked for."""
    check_versions(batch.samples, state.version, params)
    prefix, progress = "actor" if params.objective == "policy" else "critic", Progress(context)
    if not batch.trained_rows():
        return skipped(state, batch, params)
    with training(state.model, params):
        own = share_of(state, batch, batch.trained_rows(), params)
        old = _old_logprobs(state, batch, params, own, progress)
        correction = whole_correction(batch, old, params)
        goal = targets(batch, params, old, state.carry, None if correction is None else correction.weights)
        if old is not None and params.objective == "policy" and not params.given:
            _check_mismatch(batch, old, own, state.ranks, params)
        goal = selected(batch, goal, old, correction, params)
        kept = batch.mask if correction is None else correction.mask
        given, drawn = batch, draw(batch, params)
        if drawn is not None:
            batch, goal, old, kept = redrawn(batch, goal, old, kept, drawn)
        parts, computed, worked = list[dict[str, float]](), 0, 0
        for epoch in range(params.epochs):
            for number, rows in enumerate(mini_batches(batch, params.mini_batches)):
                own = share_of(state, batch, rows, params)
                computed += own.tokens
                worked += sum(pack.tokens.numel() for pack in own.packs)
                progress.stage(f"epoch {epoch + 1}, mini-batch {number + 1}", len(own.packs))
                step = yield from _one_step(state, own, rows, batch, goal, old, kept, params, progress)
                parts.append(step)
    if not any(parts):
        return skipped(state, given, params)
    empty, parts = parts.count({}), [step for step in parts if step]
    metrics = {name: _over_steps(name, parts) for name in parts[0]} | goal.metrics
    metrics[f"{prefix}/lr"] = parts[-1][f"{prefix}/lr"]
    if empty:
        metrics[f"{prefix}/skipped_updates"] = float(empty)
    if drawn is not None:
        given.mismatch[drawn], given.advantage[drawn] = batch.mismatch, batch.advantage
    carry = after_entropy(params, goal.carry, metrics.get("actor/entropy", 0.0))
    done = {"optimizer_steps": len(parts), "packs": own.count, "computed_tokens": computed}
    done |= {"shared_prefix": int(prefix_shared(state, batch))}
    finite, stats = told(state, given, metrics)
    return finite, stats | done | rank_tokens(state, given, worked), carry


def _one_step(
    state: TrainState,
    own: Share,
    rows: Sequence[int],
    batch: TrainBatch,
    goal: Targets,
    old: Tensor | None,
    kept: Tensor,
    params: TrainParams,
    check: Check,
) -> Generator[Work, None, dict[str, float]]:
    totals = denominators(batch, rows, kept, params)
    if not totals.trained.tokens:
        return {}  # correction.reject has left nothing of the mini-batch

    def work(some: Share) -> Work:
        return Work(state.forward, some, batch, goal, old, totals, params, check)

    def gradients(pack: Pack) -> Iterator[tuple[str, Tensor]]:
        state.optimizer.zero_grad()
        work(Share((pack,), 0, 1, pack.tokens.numel())).run()
        return state.optimizer.gradients()

    state.optimizer.zero_grad()
    whole = work(own)
    yield whole
    metrics = combine_metrics(state.ranks.gather(combine_metrics(whole.metrics), "dp"))
    if old is None and params.objective == "policy" and not params.given:
        check_bound(metrics["rollout_corr/abs_diff_mean"], batch, params)
    return metrics | update(state, params, lambda: blame(gradients, [(batch, own.packs)]))


def mini_batches(batch: TrainBatch, count: int) -> list[list[int]]:
    """The trained samples in `count` parts of whole prompts (fewer when there are fewer prompts), in their order."""
    rows = batch.trained_rows()
    groups = list(dict.fromkeys(int(batch.samples.group[row]) for row in rows))
    parts = [set(part.tolist()) for part in np.array_split(np.array(groups), min(count, len(groups)))]
    return [[row for row in rows if int(batch.samples.group[row]) in part] for part in parts]


def passes_of(batch: TrainBatch, params: TrainParams) -> list[list[int]]:
    """The samples of each pass of an epoch, and of one before them."""
    return [batch.trained_rows(), *(mini_batches(batch, params.mini_batches) if params.mini_batches > 1 else ())]


def _old_logprobs(
    state: TrainState, batch: TrainBatch, params: TrainParams, own: Share, progress: Progress
) -> Tensor | None:
    """Log-probabilities of the weights before the step, where it wants them: those that came with the samples, unless
    only part of the distribution was sampled from. How much that is, nobody else says."""
    given, whole = batch.token.get("old_logprobs"), truncation(params) == WHOLE and not params.penalized
    enough = given is not None and whole and not params.wants_more_of_old
    if (not state.forward.policy and not params.given) or enough or (given is None and not params.wants_old):
        return given
    progress.stage("old log-probabilities", len(own.packs))
    old = state.ranks.sum(batch_logprobs(state.forward, own, batch, params, progress))
    for column in (batch.kept_mass, *((batch.entropy, batch.squared_mass) if params.wants_more_of_old else ())):
        column.copy_(state.ranks.sum(column))
    return old


def _check_mismatch(batch: TrainBatch, old: Tensor, own: Share, ranks: Ranks, params: TrainParams) -> None:
    """Of all samples; each rank knows what the engine said of its packs'."""
    here = torch.zeros_like(batch.mask, dtype=torch.bool)
    for pack in own.packs:
        here[pack.flat] = batch.mask[pack.flat] == 1
    off = (old - batch.kept_mass - batch.rollout_logprobs).abs()[here].double()
    total, count = ranks.sum(torch.stack((off.sum(), here.sum().double()))).tolist()
    check_bound(total / count, batch, params)


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


def _after(parent: Version, params: TrainParams, identity: str) -> Version:
    return Version(params.model, parent.number + 1, hashlib.sha256(identity.encode()).hexdigest()[:12])


def _batch(samples: SampleBatch, columns: Sequence[Columns], params: TrainParams) -> TrainBatch:
    samples = without(samples, set(params.dropped))
    return build(samples, Columns.align(samples, columns), params)
