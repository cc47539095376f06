"""What a step of all samples at once (function.py) and one that is fed (streamed.py) have in common."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from transformers import PreTrainedModel

from functions.base.samples import Ragged, SampleBatch
from functions.base.wire import Version
from functions.call.function import FatalError
from functions.call.inputs import sample_name
from functions.call.train_params import TrainParams
from functions.models.forward import shares_prefix
from functions.models.packing import Pack, make_packs
from functions.models.pretrained import micro_batch_default
from functions.train.batch import TrainBatch
from functions.train.parallel import Share, share
from functions.train.state import TrainState


@contextmanager
def training(model: PreTrainedModel, params: TrainParams) -> Iterator[None]:
    """The model in training mode, with or without checkpointing."""
    model.train()
    if params.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()
    try:
        yield
    finally:
        model.train(False)


def prefix_shared(state: TrainState, batch: TrainBatch) -> bool:
    """Whether the batch's prompts are computed once for all their samples."""
    return shares_prefix(state.model.config, int(batch.samples.token_counts.max()))


def share_of(state: TrainState, batch: TrainBatch, rows: Sequence[int], params: TrainParams) -> Share:
    """The rank's share of the packs of `rows`."""
    shared = prefix_shared(state, batch)
    if state.ranks.count("cp") > 1 and not shared:
        raise FatalError("cp: wants samples within the model's sliding window: rows of samples are not divided")

    def packs_of(budget_tokens: int) -> list[Pack]:
        replay = params.objective == "policy"
        return make_packs(batch.samples, rows, budget_tokens=budget_tokens, shared=shared, replay=replay)

    budget = params.micro_batch_tokens or micro_batch_default(state.model.device)
    ranks = state.ranks
    return share(packs_of, budget, ranks.place("dp"), ranks.count("dp"), ranks.count("pp"))


def packed_rows(state: TrainState, batch: TrainBatch, parts: Sequence[Sequence[int]], params: TrainParams) -> set[int]:
    """The samples that this rank's packs of any of the `parts` read; lengths and masks say which."""
    samples, first = batch.samples, dict[int, int]()
    blank = Ragged(np.zeros(len(samples.mask), np.int32), samples.responses.lengths)
    planned = replace(batch, samples=replace(samples, responses=blank, experts=None))
    own = (share_of(state, planned, part, params) for part in parts if part)
    rows = {row for some in own for pack in some.packs for row in pack.rows}
    if samples.experts is not None:  # make_packs takes those of a prompt's last token from its first response
        for row in np.flatnonzero(samples.responses.lengths).tolist():
            first.setdefault(int(samples.prompt[row]), row)
        rows |= {first[int(samples.prompt[row])] for row in rows}
    return rows


def update(state: TrainState, params: TrainParams, blame: Callable[[], str]) -> dict[str, float]:
    """Clips and applies the gradients that are there. FatalError when they are not finite; `blame` says whose they are.

    Metrics: grad_norm and lr, of actor or critic.
    """
    prefix, stage = "actor" if params.objective == "policy" else "critic", state.forward.stage
    if stage is None:
        norm = state.optimizer.grad_norm()
    else:
        stage.add_tied(state.optimizer.named)
        norm = stage.whole_norm(state.optimizer.grad_norm(without=stage.copied))
    if not math.isfinite(float(norm)):
        if state.ranks.size > 1:
            raise FatalError(f"gradient norm is {float(norm)}; with one replica the message names sample and parameter")
        raise FatalError(f"gradient norm is {float(norm)}: {blame()}")
    return {f"{prefix}/grad_norm": float(norm), f"{prefix}/lr": state.optimizer.step(params.optimizer, norm)}


def told(
    state: TrainState, batch: TrainBatch, metrics: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """What a step says: its finite metrics, and counts of its batch."""
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return finite, {
        "non_finite_metrics": len(metrics) - len(finite),  # a perplexity may overflow; JSON has no form for it
        "ranks": state.ranks.size,
        "tokens": int(batch.samples.token_counts.sum()),  # of all samples, once, however many epochs
        "samples": batch.count,
        "trained_samples": len(batch.trained_rows()),
    }


def check_versions(samples: SampleBatch, parent: Version, params: TrainParams) -> None:
    """FatalError naming the first sample that `parent`, the policy that the call improves, has not made.

    A critic's call names no policy: its samples are of one version, whichever; the actor's call has the same samples.
    """
    wanted = parent.number if params.objective == "policy" else int(samples.version[0])
    for row in (samples.version != wanted).nonzero()[0][:1]:
        raise FatalError(
            f"{sample_name(samples, row)} was made by version {samples.version[row]} of the policy, wants version "
            f"{wanted}: stale weights"
        )


def check_bound(mean: float, batch: TrainBatch, params: TrainParams) -> None:
    """FatalError where rollout and trainer disagree by more than the params allow."""
    bound = params.rollout_bound
    if bound is not None and not mean <= bound:
        raise FatalError(
            f"rollout log-probabilities differ from this version's by {mean:.3g} on average, "
            f"max_rollout_logprob_diff is {bound:.3g}; the samples say that version {batch.samples.version[0]} made "
            'them: stale weights? (algorithm.max_rollout_logprob_diff sets another bound, "off" none)'
        )
