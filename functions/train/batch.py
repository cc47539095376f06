"""From samples and columns to what the losses need: scores, advantages, returns, masks, of the whole batch."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from functions.algorithms.advantages import ADVANTAGES
from functions.algorithms.entropy import adaptive_entropy_coef
from functions.algorithms.groups import informative_groups
from functions.algorithms.kl import adaptive_kl_coef, reward_kl
from functions.algorithms.lagrangian import mix_advantages, update_multiplier
from functions.algorithms.metrics import batch_metrics, combine_metrics
from functions.algorithms.ragged import from_lengths, keep_sequences
from functions.algorithms.registry import call_with
from functions.algorithms.rewards import overlong_penalty, penalized_scores, scale_scores, token_rewards
from functions.base.samples import Columns, Finish, SampleBatch
from functions.call.function import FatalError
from functions.call.train_params import TrainParams
from functions.train.named import named


@dataclass(frozen=True)
class TrainBatch:
    """The samples, and per response token [N] or per sample [S] what is known before any forward pass."""

    samples: SampleBatch
    segment: Tensor
    mask: Tensor
    """float32 [N]: 1 where a token trains (chosen by the policy, its sample not filtered)."""
    rollout_logprobs: Tensor
    sample: dict[str, Tensor]
    token: dict[str, Tensor]
    mismatch: Tensor = field(init=False)
    """[S], filled as the packs pass (mismatch.py); nan: not yet, or the sample does not train."""

    difference: Tensor = field(init=False)
    """[N], as `mismatch`, with its sign; nan of what does not train."""
    advantage: Tensor = field(init=False)
    """[S], as `mismatch`: the mean advantage of a sample's tokens."""
    kept_mass: Tensor = field(init=False)
    """[N], filled as the packs pass: ln of what top-k and top-p keep of the policy's distribution before the step."""

    entropy: Tensor = field(init=False)
    """[N], of the policy before the step; filled where it is wanted, as `squared_mass` [N], its sum of p squared."""
    squared_mass: Tensor = field(init=False)

    def __post_init__(self) -> None:
        for name in ("mismatch", "advantage"):
            object.__setattr__(self, name, torch.full((self.count,), torch.nan))
        object.__setattr__(self, "difference", torch.full_like(self.mask, torch.nan))
        for name in ("kept_mass", "entropy", "squared_mass"):
            object.__setattr__(self, name, torch.zeros_like(self.mask))

    @property
    def count(self) -> int:
        return len(self.samples)

    def trained_rows(self) -> list[int]:
        rows: list[int] = torch.unique(self.segment[self.mask == 1]).tolist()
        return rows

    def column(self, name: str, needed_by: str) -> Tensor:
        """A token column; FatalError naming the one that lacks."""
        if name not in self.token:
            raise FatalError(f"inputs: token column {name!r} is missing, {needed_by} needs it")
        return self.token[name]

    def sample_column(self, name: str, needed_by: str) -> Tensor:
        if name not in self.sample:
            raise FatalError(f"inputs: sample column {name!r} is missing, {needed_by} needs it")
        return self.sample[name]


@dataclass(frozen=True)
class Targets:
    """What the objective is computed from, per response token [N]."""

    advantages: Tensor
    returns: Tensor
    metrics: dict[str, float]
    carry: dict[str, float] = field(default_factory=dict)
    """Adaptive numbers for the next step (kl_coef, multiplier, entropy_coef): part of the version."""
    entropy_coef: float = 0.0
    """Of this step."""
    scale: float = 1.0
    """Of the correction's weights."""
    chosen: Tensor | None = None
    """bool [N]: the tokens that a loss treats in its own way (algorithms/covariance.py)."""
    keep: Tensor | None = None
    """float32 [N]: 0 where a token has no policy gradient (top_entropy_quantile)."""


def build(samples: SampleBatch, columns: Columns, params: TrainParams) -> TrainBatch:
    """Filters and masks: what the groups at hand decide, also where nothing of them trains."""
    sample = {name: torch.from_numpy(values) for name, values in columns.sample.items()}
    token = {name: torch.from_numpy(values) for name, values in columns.token.items()}
    segment = from_lengths(lengths=torch.from_numpy(samples.responses.lengths.astype("int64")))
    mask = torch.from_numpy(samples.mask).clone()
    batch = TrainBatch(samples, segment, mask, torch.from_numpy(samples.logprobs), sample, token)
    keep = torch.ones(len(samples), dtype=torch.bool)
    if params.filter_groups:
        scores = batch.sample_column(params.score.column, "filter_groups")
        keep &= informative_groups(scores=scores, group=_group(samples))
    if params.score.mask_overlong:
        keep &= torch.from_numpy(samples.finish != Finish.LENGTH)
    return replace(batch, mask=keep_sequences(mask=mask, segment=segment, keep=keep))


def targets(
    batch: TrainBatch,
    params: TrainParams,
    old_logprobs: Tensor | None,
    carry: dict[str, float],
    correction_weights: Tensor | None = None,
) -> Targets:
    """Advantages and returns of the whole batch. `old_logprobs` [N] are needed by KL in the reward and distillation."""
    samples, segment, mask = batch.samples, batch.segment, batch.mask
    scores, metrics = _scores(batch, params), dict[str, float]()
    raw, new = scores, dict(carry)
    kl: Tensor | None = None
    coef = 0.0
    reference = batch.token.get("ref_logprobs")
    if params.kl is not None and params.kl.where == "reward":
        coef = carry.get("kl_coef", params.kl.coef) if params.kl.target is not None else params.kl.coef
        kl, mean = reward_kl(
            logprobs=_needed(old_logprobs, "kl in the reward"),
            reference_logprobs=batch.column("ref_logprobs", "kl"),
            segment=segment,
            mask=mask,
            kind=params.kl.kind,
        )
        metrics |= {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": coef}
        if params.kl.target is not None:
            new["kl_coef"] = adaptive_kl_coef(
                coef=coef, kl=mean, target=params.kl.target, horizon=params.kl.horizon, sequences=batch.count
            )
        scores = penalized_scores(scores=scores, segment=segment, mask=mask, kl=kl, kl_coef=coef)
    earned = batch.token.get("turn_rewards")
    earned = None if earned is None else earned * params.score.scale
    rewards = token_rewards(scores=raw, segment=segment, mask=mask, kl=kl, kl_coef=coef, turn_rewards=earned)
    ends = token_rewards(scores=raw, segment=segment, mask=mask, turn_rewards=earned) if earned is not None else None
    available = {
        "scores": scores,
        "group": _group(samples),
        "rewards": rewards,
        "turn_rewards": ends,
        "anchors": batch.token.get("anchor"),
        "values": batch.token.get(params.values),
        "baselines": batch.sample.get("baseline"),
        "old_logprobs": old_logprobs,
        "old_values": old_logprobs if params.objective == "value" else None,
        "reference_logprobs": reference,
        "squared_mass": batch.squared_mass,
        "correction_weights": correction_weights,
        **_components(batch, params, scores),
        "segment": segment,
        "mask": mask,
    }
    estimate = call_with(named(params.advantage, ADVANTAGES), available, params.advantage_options)
    metrics |= combine_metrics([estimate.metrics])
    advantages = estimate.advantages
    if params.cost is not None and params.objective == "policy":
        costs = batch.sample_column(params.cost.column, "cost")
        multiplier = carry.get("multiplier", params.cost.multiplier)
        mean_cost = float(costs.double().mean())
        new["multiplier"] = update_multiplier(
            multiplier=multiplier, mean_cost=mean_cost, limit=params.cost.limit, lr=params.cost.lr,
            maximum=params.cost.maximum,
        )  # fmt: skip
        own = available | {
            "rewards": token_rewards(scores=costs, segment=segment, mask=mask),
            "values": batch.column(params.cost.values, "cost"),
        }
        cost = call_with(named(params.advantage, ADVANTAGES), own, params.advantage_options)
        advantages = mix_advantages(rewards=advantages, costs=cost.advantages, multiplier=new["multiplier"])
        metrics |= {"critic/cost/mean": mean_cost, "actor/cost_multiplier": new["multiplier"]}
    if not params.given:
        scored = params.advantage != "distillation" or params.score.column in batch.sample
        metrics |= batch_metrics(
            scores=batch.sample.get(params.score.column, raw) if scored else None, mask=mask, segment=segment,
            advantages=advantages, returns=estimate.returns, rewards=rewards, values=batch.token.get(params.values),
        )  # fmt: skip
    for name in params.score.weights:  # as TRL has them
        values = batch.sample_column(name, "reward.weights").double()
        metrics |= {
            f"rewards/{name}/mean": float(values.mean()),
            f"rewards/{name}/std": float(values.std(correction=0)),
        }
    coef = entropy_coef(params, carry)
    return Targets(advantages, estimate.returns, metrics | length_metrics(samples), new, coef)


def entropy_coef(params: TrainParams, carry: dict[str, float]) -> float:
    """Of the entropy bonus in a step of the version that says `carry`."""
    adaptive = params.adaptive_entropy
    if adaptive is None:
        return params.entropy_coef
    low = "entropy" in carry and carry["entropy"] <= adaptive.target
    return carry.get("entropy_coef", params.entropy_coef) if low else 0.0


def after_entropy(params: TrainParams, carry: dict[str, float], entropy: float) -> dict[str, float]:
    """`carry` of the next version, after a step of this entropy."""
    adaptive = params.adaptive_entropy
    if adaptive is None or params.objective != "policy":
        return carry
    coef = adaptive_entropy_coef(
        coef=carry.get("entropy_coef", params.entropy_coef), entropy=entropy, target=adaptive.target,
        delta=adaptive.delta, least=adaptive.least, most=adaptive.most,
    )  # fmt: skip
    return carry | {"entropy_coef": coef, "entropy": entropy}


def _components(batch: TrainBatch, params: TrainParams, scores: Tensor) -> dict[str, Tensor]:
    """The rewards that the score is made of [S, K], and their weights [K]; of one reward the score itself."""
    weights = params.score.weights
    if params.advantage != "gdpo":
        return {}
    if not weights:
        return {"components": scores[:, None], "component_weights": torch.ones(1)}
    columns = [batch.sample_column(name, "advantage 'gdpo'") for name in weights]
    return {"components": torch.stack(columns, -1), "component_weights": torch.tensor([*weights.values()])}


def length_metrics(samples: SampleBatch) -> dict[str, float]:
    """response_length/* and prompt_length/*, verl's names, over the samples."""
    metrics = dict[str, float]()
    for name, lengths in (
        ("response_length", samples.responses.lengths),
        ("prompt_length", samples.prompts.lengths[samples.prompt]),
    ):
        metrics |= {
            f"{name}/mean": float(lengths.mean()),
            f"{name}/max": float(lengths.max()),
            f"{name}/min": float(lengths.min()),
        }
    return metrics | {"response_length/clip_ratio": float((samples.finish == Finish.LENGTH).mean())}


def _scores(batch: TrainBatch, params: TrainParams) -> Tensor:
    score = params.score
    if params.advantage == "distillation" or params.given:
        return batch.sample.get(score.column, torch.zeros(batch.count))
    scores = scale_scores(
        scores=batch.sample_column(score.column, f"advantage {params.advantage!r}"),
        shift=score.shift, scale=score.scale, low=score.low, high=score.high,
    )  # fmt: skip
    if score.overlong_buffer is not None and params.max_response_length is not None:
        lengths = torch.from_numpy(batch.samples.responses.lengths.astype("int64"))
        scores = scores + overlong_penalty(
            lengths=lengths, max_length=params.max_response_length, buffer=score.overlong_buffer,
            factor=score.overlong_factor,
        )  # fmt: skip
    return scores


def _needed(old_logprobs: Tensor | None, what: str) -> Tensor:
    if old_logprobs is None:
        raise FatalError(f"inputs: token column 'old_logprobs' is missing, {what} needs it")
    return old_logprobs


def _group(samples: SampleBatch) -> Tensor:
    return torch.from_numpy(samples.group.astype("int64"))
