"""What a step decides of the whole batch before its first gradient, besides advantages: which tokens its loss treats in
its own way, which have a gradient at all, and which samples take the places of others."""

from dataclasses import replace

import torch
from torch import Tensor

from functions.algorithms import covariance
from functions.algorithms.correction import Correction, mean_weight
from functions.algorithms.entropy import high_entropy
from functions.algorithms.options import COVARIANCE
from functions.algorithms.ragged import from_lengths
from functions.algorithms.resample import resample
from functions.call.train_params import TrainParams
from functions.train.batch import Targets, TrainBatch


def selected(
    batch: TrainBatch, goal: Targets, old: Tensor | None, correction: Correction | None, params: TrainParams
) -> Targets:
    """`goal` with what the params choose by the policy before the step (`old` [N]: its log-probabilities)."""
    if params.objective != "policy":
        return goal
    where = {"segment": batch.segment, "mask": batch.mask}
    settings = params.correction
    if settings is not None and settings.normalize and settings.level is not None and correction is not None:
        goal = replace(goal, scale=1.0 / mean_weight(weights=correction.weights, level=settings.level, **where))
    if params.top_entropy_quantile < 1:
        share = params.top_entropy_quantile
        goal = replace(goal, keep=high_entropy(entropy=batch.entropy, mask=batch.mask, share=share))
    if params.loss in COVARIANCE:
        assert old is not None, "TrainParams.wants_old"
        options = COVARIANCE[params.loss] | {k: v for k, v in params.loss_options.items() if k.startswith("cov_")}
        found = covariance.covariances(logprobs=old, advantages=goal.advantages, **where)
        if params.loss == "kl_cov":
            chosen = covariance.largest(found, batch.mask, ratio=options["cov_ratio"])
        else:
            chosen = covariance.random_between(
                found, batch.mask, ratio=options["cov_ratio"], low=options["cov_low"], high=options["cov_high"],
                seed=_seed(batch),
            )  # fmt: skip
        goal = replace(goal, chosen=chosen)
    return goal


def draw(batch: TrainBatch, params: TrainParams) -> Tensor | None:
    """int64 [S]: the samples that take the places of all; None: each its own. Of a step's calls all draw the same."""
    if params.resample is None:
        return None
    scores = batch.sample_column(params.score.column, "resample")
    again = params.resample
    return resample(scores=scores, method=again.method, power=again.power, seed=_seed(batch))


def redrawn(
    batch: TrainBatch, goal: Targets, old: Tensor | None, kept: Tensor, rows: Tensor
) -> tuple[TrainBatch, Targets, Tensor | None, Tensor]:
    """The samples `rows` in the places of all, with what is known of each of their tokens."""
    places = torch.from_numpy(batch.samples.responses.places(rows.numpy()))

    def of(values: Tensor) -> Tensor:
        return values[places]

    samples = batch.samples.select(rows.numpy())
    again = TrainBatch(
        samples, from_lengths(lengths=torch.from_numpy(samples.responses.lengths.astype("int64"))), of(batch.mask),
        of(batch.rollout_logprobs), {name: values[rows] for name, values in batch.sample.items()},
        {name: of(values) for name, values in batch.token.items()},
    )  # fmt: skip
    again.kept_mass.copy_(of(batch.kept_mass))
    chosen, keep = (None if values is None else of(values) for values in (goal.chosen, goal.keep))
    moved = replace(goal, advantages=of(goal.advantages), returns=of(goal.returns), chosen=chosen, keep=keep)
    return again, moved, None if old is None else of(old), of(kept)


def _seed(batch: TrainBatch) -> int:
    """The same in every call of a step, another in the next: of the samples' version and groups."""
    return int(batch.samples.version[0]) << 32 | int(batch.samples.group.min())
