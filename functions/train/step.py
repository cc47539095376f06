"""One optimizer step over packs: gradients of the whole (mini-)batch's loss, added up pack by pack.

    packs -> forward -> loss / totals of the mini-batch -> backward        accumulate(): .grad, metrics (both add up)
    .grad -> norm -> clip -> AdamW                                          Optimizer
The totals (denominators) are passed in, so that packs, micro-batches and ranks add up to one loss whatever the split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from functions.algorithms.aggregation import Totals, batch_totals
from functions.algorithms.correction import Correction, rollout_correction
from functions.algorithms.entropy import entropy_loss
from functions.algorithms.kl import kl_loss
from functions.algorithms.policy_losses import POLICY_LOSSES
from functions.algorithms.registry import call_with
from functions.algorithms.truncation import Truncation
from functions.algorithms.value_loss import value_loss
from functions.call.function import FatalError
from functions.call.inputs import sample_name
from functions.call.train_params import CorrectionParams, TrainParams
from functions.models.packing import Pack
from functions.train.batch import Targets, TrainBatch
from functions.train.mismatch import note
from functions.train.named import named
from functions.train.parallel import Forward, Share, idle_pass

Metrics = dict[str, Tensor]
Check = Callable[[int], None]
"""Called before each pack with its number: raises when the call should end."""


def precision(params: TrainParams, device: torch.device) -> AbstractContextManager[object]:
    if params.dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def truncation(params: TrainParams) -> Truncation:
    """Of the distribution that the samples come from."""
    return Truncation(params.top_p, params.top_k)


class Denominators(NamedTuple):
    """Of a (mini-)batch. The two differ where the correction rejects."""

    sampled: Totals
    """Of the mask before rejection: the correction's metrics are shares of it."""
    trained: Totals
    """Of what is left: the losses'. In verl too a rejected token is in no mean
    (verl/trainer/ppo/rollout_corr_helper.py, compute_rollout_correction_and_add_to_batch)."""


def kept_mask(batch: TrainBatch, old_logprobs: Tensor | None, params: TrainParams) -> Tensor:
    """[N]: the mask without what the correction rejects."""
    if not params.rejects or params.objective == "value":
        return batch.mask
    assert old_logprobs is not None, "TrainParams.wants_old"
    totals = _totals(batch, batch.trained_rows(), batch.mask, params)
    tensors = {
        "rollout_logprobs": batch.rollout_logprobs, "kept_mass": batch.kept_mass, "segment": batch.segment,
        "mask": batch.mask,
    }  # fmt: skip
    return _correction(old_logprobs, tensors, totals, params).mask


def denominators(batch: TrainBatch, rows: Sequence[int], kept: Tensor, params: TrainParams) -> Denominators:
    """Of the samples `rows`, of which `kept` [N] trains. Raises FatalError where that is nothing."""
    trained = _totals(batch, rows, kept, params)
    if not trained.tokens:
        raise FatalError("correction.reject: every token of a mini-batch is rejected, nothing is left to train on")
    return Denominators(_totals(batch, rows, batch.mask, params), trained)


def _totals(batch: TrainBatch, rows: Sequence[int], mask: Tensor, params: TrainParams) -> Totals:
    """With the constant of the aggregation."""
    chosen = torch.zeros(batch.count, dtype=torch.bool)
    chosen[list(rows)] = True
    inside = chosen[batch.segment]
    return batch_totals(mask=mask[inside], segment=batch.segment[inside], num_sequences=len(rows), norm=params.norm)


def _correction(old: Tensor, tensors: Mapping[str, Tensor], totals: Totals, params: TrainParams) -> Correction:
    settings = params.correction or CorrectionParams(level=None)  # the metrics alone
    reject = {name: tuple(bound) if isinstance(bound, list) else bound for name, bound in settings.reject.items()}
    return rollout_correction(
        logprobs=old, rollout_logprobs=tensors["rollout_logprobs"], kept_mass=tensors["kept_mass"],
        segment=tensors["segment"], mask=tensors["mask"], totals=totals,
        level=settings.level, cap=settings.cap, floor=settings.floor, reject=reject,
    )  # fmt: skip


def batch_logprobs(forward: Forward, share: Share, batch: TrainBatch, params: TrainParams, check: Check) -> Tensor:
    """[N] log-probabilities of the weights as they are, without gradient; 0 where no pack has the token.

    Fills `batch.kept_mass` of the packs' tokens.
    """
    result = torch.zeros(batch.segment.shape)
    device = forward.model.device
    with torch.no_grad():
        for number, pack in enumerate(share.packs):
            check(number)
            with precision(params, device):
                part, _, kept = forward(pack.to(device), params.temperature, truncation(params))
            result[pack.flat], batch.kept_mass[pack.flat] = part.cpu(), kept.cpu()
        for _ in range(share.idle):
            idle_pass(forward, device)
    return result


def accumulate(
    forward: Forward,
    share: Share,
    batch: TrainBatch,
    targets: Targets,
    old_logprobs: Tensor | None,
    totals: Denominators,
    params: TrainParams,
    check: Check,
) -> list[Metrics]:
    """Adds the gradient of the packs' share of the loss to every .grad; the metrics of each pack.

    `old_logprobs` None: this is the first pass of a single step, and the old log-probabilities are the current ones,
    detached. FatalError naming the sample of a non-finite number.
    """
    device = forward.model.device
    parts = []
    for number, pack in enumerate(share.packs):
        check(number)
        placed = pack.to(device)
        tensors = _of_pack(batch, targets, old_logprobs, params, pack, device)
        with precision(params, device):
            outputs = forward(placed, params.temperature, truncation(params))
            if forward.policy:
                logprobs, entropy, kept = outputs
                if params.single_step:  # the weights are still those that the samples were made by
                    tensors["kept_mass"] = kept
                old = tensors.get("old_logprobs", logprobs.detach())
                note(batch, pack, old - tensors["kept_mass"], tensors)
                loss, metrics = _policy_objective(logprobs, entropy, tensors, totals, params, batch)
            else:
                (values,) = outputs
                loss, metrics = _value_objective(values, tensors, totals.trained, params, batch)
        if not bool(torch.isfinite(loss)):
            raise FatalError(f"loss is {float(loss.detach())} over {_samples(batch, pack)}")
        loss.backward()  # type: ignore[no-untyped-call]
        parts.append(metrics)
    for _ in range(share.idle):
        with precision(params, device):
            idle_pass(forward, device)
    return parts


def blame(
    gradients: Callable[[Pack], Iterator[tuple[str, Tensor]]], parts: Iterable[tuple[TrainBatch, Sequence[Pack]]]
) -> str:
    """Which pack and parameter a non-finite gradient comes from: what `gradients` gives is looked at pack by pack."""
    for batch, packs in parts:
        for pack in packs:
            for name, gradient in gradients(pack):
                if not bool(torch.isfinite(gradient).all()):
                    return f"{_samples(batch, pack)}, first in parameter {name!r}"
    return "all packs together (each alone is finite)"


def _policy_objective(
    logprobs: Tensor,
    entropy: Tensor,
    tensors: Mapping[str, Tensor],
    totals: Denominators,
    params: TrainParams,
    batch: TrainBatch,
) -> tuple[Tensor, Metrics]:
    _check_finite(logprobs, tensors, batch, "log-probability")
    segment, old = tensors["segment"], tensors.get("old_logprobs", logprobs.detach())
    correction = _correction(old, tensors, totals.sampled, params)
    shared = {
        "logprobs": logprobs,
        "segment": segment,
        "mask": correction.mask,
        "totals": totals.trained,
        "aggregation": params.aggregation,
    }
    available = shared | {
        "old_logprobs": old,
        "advantages": tensors["advantages"],
        "weights": None if params.correction is None else correction.weights,
    }
    loss, policy_metrics = call_with(named(params.loss, POLICY_LOSSES), available, params.loss_options)
    metrics = correction.metrics | policy_metrics
    if params.kl is not None and params.kl.where == "loss":
        available = shared | {
            "reference_logprobs": tensors["ref_logprobs"],
            "kind": params.kl.kind,
            "coef": params.kl.coef,
        }
        term, kl_metrics = call_with(kl_loss, available)
        loss, metrics = loss + term, metrics | kl_metrics
    term, entropy_metrics = call_with(entropy_loss, shared | {"entropy": entropy, "coef": params.entropy_coef})
    return (loss + term if params.entropy_coef else loss), metrics | entropy_metrics


def _value_objective(
    values: Tensor, tensors: Mapping[str, Tensor], totals: Totals, params: TrainParams, batch: TrainBatch
) -> tuple[Tensor, Metrics]:
    _check_finite(values, tensors, batch, "value")
    return value_loss(
        values=values,
        old_values=tensors["values"],
        returns=tensors["returns"],
        segment=tensors["segment"],
        mask=tensors["mask"],
        totals=totals,
        aggregation=params.aggregation,
        clip=params.value_clip,
    )


def _of_pack(
    batch: TrainBatch,
    targets: Targets,
    old_logprobs: Tensor | None,
    params: TrainParams,
    pack: Pack,
    device: torch.device,
) -> dict[str, Tensor]:
    """The per-token tensors that the objective needs, of the pack's tokens, on the device."""
    whole = {
        "segment": batch.segment,
        "mask": batch.mask,
        "rollout_logprobs": batch.rollout_logprobs,
        "kept_mass": batch.kept_mass,
        "advantages": targets.advantages,
        "returns": targets.returns,
    }
    if old_logprobs is not None:
        whole["old_logprobs"] = old_logprobs
    if params.objective == "value":
        whole["values"] = batch.column(params.values, "the value objective")
    elif params.kl is not None and params.kl.where == "loss":
        whole["ref_logprobs"] = batch.column("ref_logprobs", "kl")
    return {name: tensor[pack.flat].to(device) for name, tensor in whole.items()}


def _check_finite(values: Tensor, tensors: Mapping[str, Tensor], batch: TrainBatch, what: str) -> None:
    bad = (~torch.isfinite(values.detach()) & (tensors["mask"] == 1)).nonzero()
    if len(bad):
        token = int(bad[0, 0])
        row = int(tensors["segment"][token])
        raise FatalError(f"{what} is {float(values.detach()[token])} at a token of {sample_name(batch.samples, row)}")


def _samples(batch: TrainBatch, pack: Pack) -> str:
    more = f" and {len(pack.rows) - 1} others of its pack" if len(pack.rows) > 1 else ""
    return sample_name(batch.samples, pack.rows[0]) + more
