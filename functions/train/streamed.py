"""One optimizer step over samples that come in parts, while others are still being generated.

    part -> targets of its groups -> forward, backward of un-normalised sums      .grad and metrics add up
    last -> totals of all samples -> .grad / denominator -> norm -> clip -> AdamW  the same update as with all at once

Exact where a sample's share of the loss depends on its own prompt group and on the batch's denominator alone
(`TrainParams.streams`): the denominators come last. It is the same sum in another order: equal to the whole step's to
rounding (tests/train/test_streamed.py: 1e-6), not to the bit, and its order is that of arrival; so a deterministic job
does not stream (docs/decisions/0007-train-while-generating.md).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from functions.algorithms.aggregation import Totals, denominator
from functions.algorithms.metrics import averaged, combine_metrics
from functions.base.samples import Columns
from functions.base.wire import FeedPart
from functions.call.function import Context, FatalError
from functions.call.train_params import TrainParams
from functions.models.packing import Pack
from functions.train.batch import Targets, TrainBatch, after_entropy, build, targets
from functions.train.feed import Intake
from functions.train.measured import rank_tokens, skipped
from functions.train.mismatch import mismatch_columns
from functions.train.parallel import Share
from functions.train.progress import Progress
from functions.train.protocols import Inputs
from functions.train.state import TrainState
from functions.train.step import Denominators, Work, blame, denominators
from functions.train.update import check_bound, check_versions, packed_rows, share_of, told, training, update

Metrics = dict[str, float]


def optimize_streamed(
    state: TrainState, batches: Iterator[Sequence[FeedPart]], inputs: Inputs, params: TrainParams, context: Context
) -> tuple[Metrics, dict[str, float], dict[str, float], Columns]:
    """As `optimize`: improves `state` in place; (metrics, stats, carry, mismatch by sample).

    FatalError, ValueError or WireError: the state must not be used any more.
    """
    if not params.streams:
        raise FatalError("params.feed: a step with these params needs all samples before its first gradient")
    intake, progress = Intake(inputs), Progress(context)
    done: list[tuple[TrainBatch, Targets, Share]] = []
    sums: list[dict[str, Tensor]] = []
    with training(state.model, params):
        state.optimizer.zero_grad()
        for number, parts in enumerate(batches):
            joined = intake.take(parts)
            if joined is None or not (batch := build(*joined, params)).trained_rows():
                continue
            check_versions(batch.samples, state.version, params)
            batch = inputs.filled(batch, partial(packed_rows, state, batch, [batch.trained_rows()], params))
            goal = targets(batch, _of_part(params), batch.token.get("old_logprobs"), state.carry)
            own = share_of(state, batch, batch.trained_rows(), params)
            progress.stage(f"fed batch {number + 1}", len(own.packs))
            sums += _add(state, batch, goal, own, params, progress)
            done.append((batch, goal, own))
        whole = build(*intake.whole(), params)
        check_versions(whole.samples, state.version, params)
        if not done:
            return *skipped(state, whole, params), mismatch_columns([], state.ranks)
        metrics = _step(state, whole, done, sums, params, progress)
    goal = targets(whole, params, whole.token.get("old_logprobs"), state.carry)
    finite, stats = told(state, whole, metrics | goal.metrics)
    stats |= {"optimizer_steps": 1, "packs": sum(own.count for _, _, own in done), "fed_batches": len(done)}
    stats |= {"computed_tokens": sum(own.tokens for _, _, own in done)}
    worked = sum(pack.tokens.numel() for _, _, own in done for pack in own.packs)
    stats |= rank_tokens(state, whole, worked)
    carry = after_entropy(params, goal.carry, finite.get("actor/entropy", 0.0))
    return finite, stats, carry, mismatch_columns([batch for batch, _, _ in done], state.ranks)


def whole_batch(batches: Iterator[Sequence[FeedPart]], inputs: Inputs, params: TrainParams) -> TrainBatch:
    """All that is fed, when the last part has come: the batch of a call that had it as inputs."""
    intake = Intake(inputs)
    for parts in batches:
        intake.take(parts)
    return build(*intake.whole(), params)


def _of_part(params: TrainParams) -> TrainParams:
    """Whitening is a matter of the whole batch; what streams does not use whitened advantages but in its metrics."""
    if params.advantage != "gae":
        return params
    return replace(params, advantage_options={**params.advantage_options, "whiten_advantages": False})


def _add(
    state: TrainState, batch: TrainBatch, goal: Targets, own: Share, params: TrainParams, progress: Progress
) -> list[dict[str, Tensor]]:
    """The packs' gradients, as sums: to be divided when the denominators are known."""
    unit = Totals(tokens=1, sequences=1, norm=params.norm)
    old = batch.token.get("old_logprobs")
    return Work(state.forward, own, batch, goal, old, Denominators(unit, unit), params, progress).run()


def _step(
    state: TrainState,
    whole: TrainBatch,
    done: list[tuple[TrainBatch, Targets, Share]],
    sums: list[dict[str, Tensor]],
    params: TrainParams,
    progress: Progress,
) -> Metrics:
    totals = denominators(whole, whole.trained_rows(), whole.mask, params).trained
    state.optimizer.divide_grads(denominator(totals, params.aggregation))
    added = combine_metrics(state.ranks.gather(combine_metrics(sums), "dp"))
    metrics = averaged(added, totals, params.aggregation)
    if params.objective == "policy" and not params.given:
        check_bound(metrics["rollout_corr/abs_diff_mean"], whole, params)

    goals = {id(pack): (batch, goal) for batch, goal, own in done for pack in own.packs}

    def gradients(pack: Pack) -> Iterator[tuple[str, Tensor]]:
        state.optimizer.zero_grad()
        _add(state, *goals[id(pack)], Share((pack,), 0, 1, pack.tokens.numel()), params, progress)
        return state.optimizer.gradients()

    return metrics | update(state, params, lambda: blame(gradients, [(batch, own.packs) for batch, _, own in done]))
