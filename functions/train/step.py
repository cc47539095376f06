"""One optimizer step over packs: gradients of the whole (mini-)batch's loss, added up pack by pack.

    packs -> forward -> loss / totals of the mini-batch -> backward        Work: .grad, metrics (both add up)
    .grad -> norm -> clip -> AdamW                                          Optimizer
The totals (denominators) are passed in, so that packs, micro-batches and ranks add up to one loss whatever the split.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functions.algorithms.aggregation import Totals, aggregate, batch_totals
from functions.algorithms.correction import Correction, on_policy, rollout_correction
from functions.algorithms.entropy import entropy_loss
from functions.algorithms.kl import kl_loss
from functions.algorithms.options import COVARIANCE
from functions.algorithms.penalties import NO_PENALTIES, Penalties
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
from functions.train.parallel import Forward, Share, passes, run
from functions.train.pipeline import Passes

Metrics = dict[str, Tensor]
Check = Callable[[int], None]
"""Called before each pack with its number: raises when the call should end."""


def precision(params: TrainParams, device: torch.device) -> AbstractContextManager[object]:
    if params.dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def truncation(params: TrainParams) -> Truncation:
    """Of the distribution that the samples come from."""
    return Truncation(params.top_p, params.top_k, params.min_p)


def sampled_as(batch: TrainBatch, pack: Pack, params: TrainParams) -> dict[str, Any]:
    """What pack_logprobs wants to know of how the pack's tokens were sampled, besides the truncation."""
    penalties = Penalties(params.repetition_penalty, params.banned)
    if penalties == NO_PENALTIES:
        return {}
    samples, places = batch.samples, pack.flat.tolist()
    offsets, rows = samples.responses.offsets, batch.segment[pack.flat].tolist()

    def history(token: int) -> tuple[Any, Any]:
        row = rows[token]
        return samples.prompts[int(samples.prompt[row])], samples.responses.flat[offsets[row] : places[token]]

    return {"penalties": penalties, "history": history}


class Denominators(NamedTuple):
    """Of a (mini-)batch. The two differ where the correction rejects."""

    sampled: Totals
    """Of the mask before rejection: the correction's metrics are shares of it."""
    trained: Totals
    """Of what is left: the losses'. In verl too a rejected token is in no mean
    (verl/trainer/ppo/rollout_corr_helper.py, compute_rollout_correction_and_add_to_batch)."""


def whole_correction(batch: TrainBatch, old_logprobs: Tensor | None, params: TrainParams) -> Correction | None:
    """None: the step does not want it (TrainParams.corrects_whole)."""
    if not params.corrects_whole:
        return None
    assert old_logprobs is not None, "TrainParams.wants_old"
    totals = _totals(batch, batch.trained_rows(), batch.mask, params)
    tensors = {
        "rollout_logprobs": batch.rollout_logprobs, "kept_mass": batch.kept_mass, "segment": batch.segment,
        "mask": batch.mask,
    }  # fmt: skip
    return _correction(old_logprobs, tensors, totals, params, 1.0)


def denominators(batch: TrainBatch, rows: Sequence[int], kept: Tensor, params: TrainParams) -> Denominators:
    """Of the samples `rows`, of which `kept` [N] trains."""
    return Denominators(_totals(batch, rows, batch.mask, params), _totals(batch, rows, kept, params))


def _totals(batch: TrainBatch, rows: Sequence[int], mask: Tensor, params: TrainParams) -> Totals:
    """With the constant of the aggregation."""
    chosen = torch.zeros(batch.count, dtype=torch.bool)
    chosen[list(rows)] = True
    inside = chosen[batch.segment]
    return batch_totals(mask=mask[inside], segment=batch.segment[inside], num_sequences=len(rows), norm=params.norm)


def _correction(
    old: Tensor, tensors: Mapping[str, Tensor], totals: Totals, params: TrainParams, scale: float
) -> Correction:
    settings = params.correction or CorrectionParams(level=None)  # the metrics alone
    reject = {name: tuple(bound) if isinstance(bound, list) else bound for name, bound in settings.reject.items()}
    return rollout_correction(
        logprobs=old, rollout_logprobs=tensors["rollout_logprobs"], kept_mass=tensors["kept_mass"],
        segment=tensors["segment"], mask=tensors["mask"], totals=totals,
        level=settings.level, cap=settings.cap, floor=settings.floor, reject=reject, scale=scale,
    )  # fmt: skip


def batch_logprobs(forward: Forward, share: Share, batch: TrainBatch, params: TrainParams, check: Check) -> Tensor:
    """[N] log-probabilities of the weights as they are, without gradient; 0 where no pack has the token.

    Fills `batch.kept_mass`, and what TrainParams.wants_more_of_old, of the packs' tokens.
    """
    result = torch.zeros(batch.segment.shape)
    squares = {"squares": True} if params.token_baseline else {}
    device, packs = forward.model.device, share.passes

    def one(number: int, inputs: Tensor | None) -> Tensor:
        pack = packs[number]
        check(number)
        with precision(params, device):
            more = squares | (sampled_as(batch, pack, params) if pack.rows else {})
            found = forward(pack.to(device), params.temperature, truncation(params), inputs=inputs, **more)
        if pack.rows and ends(forward):
            columns = (result, batch.entropy, batch.kept_mass, batch.squared_mass)
            for column, values in zip(columns, found, strict=False):
                column[pack.flat] = values.cpu()
        states: Tensor = found[0]
        return states

    with torch.no_grad():
        run(forward, packs, one, backward=False)
    return result


@dataclass
class Work:
    """Packs of one model: each one's share of the loss, whose gradients add up."""

    forward: Forward
    share: Share
    batch: TrainBatch
    targets: Targets
    old_logprobs: Tensor | None
    """None: this is the first pass of a single step, and the old log-probabilities are the current ones, detached."""
    totals: Denominators
    params: TrainParams
    check: Check
    metrics: list[Metrics] = field(default_factory=list)
    """Of each pack; of a pipeline the last stage has them."""

    def __post_init__(self) -> None:
        self.packs = self.share.passes

    def run(self) -> list[Metrics]:
        """Adds the gradients to every .grad. FatalError naming the sample of a non-finite number."""
        run(self.forward, self.packs, self.one)
        return self.metrics

    @property
    def passes(self) -> Passes:
        return passes(self.forward, self.packs, self.one)

    def one(self, number: int, inputs: Tensor | None) -> Tensor:
        """The loss of a pack; of a pipeline's stage, from `inputs`, its states where it is not the last."""
        pack, params, batch = self.packs[number], self.params, self.batch
        device = self.forward.model.device
        self.check(number)
        placed = pack.to(device)
        with precision(params, device):
            if not pack.rows:
                idle: tuple[Tensor, ...] = self.forward(placed, 1.0, inputs=inputs)
                return sum((output.sum() * 0.0 for output in idle), torch.zeros(())) if ends(self.forward) else idle[0]
            tensors = _of_pack(batch, self.targets, self.old_logprobs, params, pack, device)
            more = sampled_as(batch, pack, params)
            more |= {"topk_ids": tensors.pop("teacher_ids").long()} if "teacher_ids" in tensors else {}
            outputs = self.forward(placed, params.temperature, truncation(params), inputs=inputs, **more)
            if not ends(self.forward):
                states: Tensor = outputs[0]
                return states
            if self.forward.policy:
                logprobs, entropy, kept, *rest = outputs
                if rest:
                    tensors["topk_logprobs"] = rest[0]
                if params.single_step:  # the weights are still those that the samples were made by
                    tensors["kept_mass"] = kept
                old = tensors.get("old_logprobs", logprobs.detach())
                note(batch, pack, old - tensors["kept_mass"], tensors)
                loss, metrics = _policy_objective(logprobs, entropy, tensors, self.totals, params, batch, self.targets)
            else:
                (values,) = outputs
                loss, metrics = _value_objective(values, tensors, self.totals.trained, params, batch)
        if not bool(torch.isfinite(loss)):
            raise FatalError(f"loss is {float(loss.detach())} over {_samples(batch, pack)}")
        self.metrics.append(metrics)
        return loss


def ends(forward: Forward) -> bool:
    """Whether its outputs are the model's."""
    return forward.stage is None or forward.stage.last


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
    targets: Targets,
) -> tuple[Tensor, Metrics]:
    _check_finite(logprobs, tensors, batch, "log-probability")
    segment, old = tensors["segment"], tensors.get("old_logprobs", logprobs.detach())
    correction = _correction(old, tensors, totals.sampled, params, targets.scale)
    shared = {
        "logprobs": logprobs,
        "segment": segment,
        "mask": correction.mask,
        "totals": totals.trained,
        "aggregation": params.aggregation,
    }
    of_loss = ("advantages", "chosen", "topk_logprobs", "teacher_logprobs")
    available = shared | {name: tensors[name] for name in of_loss if name in tensors}
    available |= {"old_logprobs": old, "weights": _weights(logprobs, tensors, correction, params)}
    choosing = COVARIANCE.get(params.loss, {})
    options = {name: value for name, value in params.loss_options.items() if name not in choosing}
    loss, policy_metrics = call_with(named(params.loss, POLICY_LOSSES), available, options)
    metrics = correction.metrics | policy_metrics
    if params.given:  # no policy is improved on; pairs tell their loss with their advantages
        metrics = {"sft/loss": loss.detach()} if params.advantage == "sft" else {}
    if params.kl is not None and params.kl.where == "loss":
        available = shared | {
            "reference_logprobs": tensors["ref_logprobs"],
            "kind": params.kl.kind,
            "coef": params.kl.coef,
        }
        term, kl_metrics = call_with(kl_loss, available)
        loss, metrics = loss + term, metrics | kl_metrics
    term, entropy_metrics = call_with(entropy_loss, shared | {"entropy": entropy, "coef": targets.entropy_coef})
    return (loss + term if targets.entropy_coef else loss), metrics | entropy_metrics


def _weights(
    logprobs: Tensor, tensors: Mapping[str, Tensor], correction: Correction, params: TrainParams
) -> Tensor | None:
    """What multiplies the policy loss of each token [N]; None: nothing does."""
    parts = [] if params.correction is None else [correction.weights]
    parts += [tensors["keep"]] if "keep" in tensors else []
    if params.off_policy_mask_threshold is not None:
        shared = {name: tensors[name] for name in ("rollout_logprobs", "advantages", "segment", "mask")}
        parts.append(on_policy(logprobs=logprobs, threshold=params.off_policy_mask_threshold, **shared))
    return torch.stack(parts).prod(0) if parts else None


def _value_objective(
    values: Tensor, tensors: Mapping[str, Tensor], totals: Totals, params: TrainParams, batch: TrainBatch
) -> tuple[Tensor, Metrics]:
    _check_finite(values, tensors, batch, "value")
    if params.advantage == "bradley_terry":
        where: dict[str, Any] = {"segment": tensors["segment"], "mask": tensors["mask"], "totals": totals}
        loss = aggregate(losses=-tensors["advantages"] * values, aggregation=params.aggregation, **where)
        return loss, {}
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
    if params.objective == "value" and not params.given:
        whole["values"] = batch.column(params.values, "the value objective")
    elif params.objective == "policy" and params.kl is not None and params.kl.where == "loss":
        whole["ref_logprobs"] = batch.column("ref_logprobs", "kl")
    if params.loss == "forward_kl_topk" and params.objective == "policy":
        names = ("teacher_logprobs", "teacher_ids")
        whole |= {name: batch.column(name, "loss 'forward_kl_topk'") for name in names}
    whole |= {name: t for name in ("chosen", "keep") if (t := getattr(targets, name)) is not None}
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
