"""What a `train` call can set. Frozen, typed, checked when built; every option of functions/algorithms is reachable.

No torch: the orchestrator checks a job with it before anything runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from functions.algorithms.names import (
    ADVANTAGES,
    AGGREGATIONS,
    FIXED_AGGREGATION,
    GIVEN,
    KL_KINDS,
    PAIRS,
    POLICY_LOSSES,
)
from functions.algorithms.options import ADVANTAGE_OPTIONS, COVARIANCE, LOSS_OPTIONS, check_options, reject_bounds
from functions.base.wire import Json
from functions.call.params import parse

Schedule = Literal["constant", "linear", "cosine"]


ROLLOUT_BOUNDS = {"float32": 0.01, "bfloat16": 0.1}
"""Of max_rollout_logprob_diff, where a job says none (docs/train.md: what was measured)."""


def rollout_bound(said: Literal["off"] | float | None, dtype: str) -> float | None:
    """What the mean difference of log-probabilities may be; None: anything."""
    return None if said == "off" else ROLLOUT_BOUNDS[dtype] if said is None else said


def _one_of(key: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise ValueError(f"{key}: got {value!r}, wants one of {', '.join(known)}")


def _above_zero(**values: float) -> None:
    for key, value in values.items():
        if not value > 0:
            raise ValueError(f"{key}: got {value}, wants a number above 0")


@dataclass(frozen=True, kw_only=True)
class OptimizerParams:
    """AdamW (arXiv:1711.05101) or Muon. Biases and norms (tensors of one dimension) are not decayed."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: for the matrices of the layers, at AdamW's lr (torch.optim.Muon, arXiv:2502.16982); AdamW for the rest."""
    optimizer_offload: bool = False
    """The optimizer's state is on the host, and on the device one parameter at a time."""
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    """Gradients are scaled to at most this global 2-norm; None does not clip."""
    schedule: Schedule = "constant"
    """After the warm-up: constant, or down to min_lr_ratio * lr at total_steps."""
    warmup_steps: int = 0
    """Optimizer steps with lr * (step + 1) / warmup_steps."""
    total_steps: int | None = None
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        _above_zero(eps=self.eps)
        if not self.lr >= 0 or not self.weight_decay >= 0:
            raise ValueError(f"lr and weight_decay: got {self.lr} and {self.weight_decay}, want numbers of at least 0")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: got {list(self.betas)}, wants two numbers in [0, 1)")
        if self.max_grad_norm is not None:
            _above_zero(max_grad_norm=self.max_grad_norm)
        if self.schedule != "constant" and self.total_steps is None:
            raise ValueError(f"schedule: {self.schedule!r} wants total_steps")


@dataclass(frozen=True, kw_only=True)
class ScoreParams:
    """Scores before the advantages: clip(scale * (score - shift), low, high), then the overlong penalty (DAPO)."""

    column: str = "score"
    weights: Mapping[str, float] = field(default_factory=dict)
    """The rewards that the score is made of, and their weights: what "gdpo" normalises one by one ([reward] says)."""
    shift: float = 0.0
    scale: float = 1.0
    low: float | None = None
    high: float | None = None
    overlong_buffer: int | None = None
    """Tokens before max_response_length in which the penalty grows from 0 to overlong_factor; None: no penalty."""
    overlong_factor: float = 1.0
    mask_overlong: bool = False
    """Samples cut off at the length limit train nothing (they still count in their group)."""

    def __post_init__(self) -> None:
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low {self.low:g} is above high {self.high:g}")
        if self.overlong_buffer is not None:
            _above_zero(overlong_buffer=self.overlong_buffer)


@dataclass(frozen=True, kw_only=True)
class KlParams:
    """Divergence from the reference (column ref_logprobs), in the loss or in the reward; coef 0 without either."""

    where: Literal["loss", "reward"] = "loss"
    kind: str = "k3"
    coef: float = 0.001
    target: float | None = None
    """Adaptive coefficient (where = reward): steered towards this KL over `horizon` samples; `coef` is the first."""
    horizon: float = 10000.0

    def __post_init__(self) -> None:
        _one_of("kind", self.kind, KL_KINDS)
        _above_zero(horizon=self.horizon)
        if self.target is not None:
            _above_zero(target=self.target)
        if self.target is not None and self.where != "reward":
            raise ValueError("target: an adaptive coefficient is one of a KL in the reward (where = 'reward')")


@dataclass(frozen=True, kw_only=True)
class CorrectionParams:
    """Importance weights and rejection for the mismatch of engine and trainer (algorithms/correction.py)."""

    level: Literal["token", "sequence"] | None = "token"
    cap: float = 2.0
    floor: float | None = None
    reject: Mapping[str, Any] = field(default_factory=dict)
    normalize: bool = False
    """Weights are divided by their mean over the batch."""

    def __post_init__(self) -> None:
        _above_zero(cap=self.cap)
        if self.floor is not None and not 0 < self.floor <= self.cap:
            raise ValueError(f"floor: got {self.floor}, wants a number above 0 and at most cap, which is {self.cap}")
        for statistic, bound in self.reject.items():
            reject_bounds(statistic, bound)


@dataclass(frozen=True, kw_only=True)
class CostParams:
    """PPO-Lagrangian (Safe-RLHF, arXiv:2310.12773): a second score is kept below `limit` by a multiplier."""

    column: str = "cost"
    values: str = "cost_values"
    limit: float = 0.0
    multiplier: float = 1.0
    """The first one; later ones are part of the trained version."""
    lr: float = 0.1
    maximum: float = 100.0

    def __post_init__(self) -> None:
        if not 0 < self.multiplier <= self.maximum:
            raise ValueError(f"multiplier: got {self.multiplier}, wants a number above 0 and at most {self.maximum}")


@dataclass(frozen=True, kw_only=True)
class AdaptiveEntropyParams:
    """The entropy bonus steered to `target` nats (algorithms/entropy.py); entropy_coef is its first coefficient."""

    target: float
    """Entropy per token, in nats."""
    delta: float = 0.005
    """Of the coefficient, per step."""
    least: float = 0.0
    """Of the coefficient."""
    most: float = 1.0
    """Of the coefficient."""

    def __post_init__(self) -> None:
        _above_zero(delta=self.delta)
        if not 0 <= self.least <= self.most:
            raise ValueError(f"least and most: got {self.least} and {self.most}, want 0 <= least <= most")


@dataclass(frozen=True, kw_only=True)
class ResampleParams:
    """PF-PPO: the step's samples are drawn anew by their scores (algorithms/resample.py)."""

    method: Literal["pow", "max_min", "max_random"] = "pow"
    """By |score|^power, of the best and the worst alone, or mostly of the best."""
    power: float = 2.0
    """Of method pow."""

    def __post_init__(self) -> None:
        _above_zero(power=self.power)


@dataclass(frozen=True, kw_only=True)
class LoraParams:
    """Low-rank adapters (arXiv:2106.09685) on the linear layers whose last name part is in `targets`."""

    rank: int
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

    def __post_init__(self) -> None:
        _above_zero(rank=self.rank, alpha=self.alpha)


@dataclass(frozen=True, kw_only=True)
class TrainParams:
    """See docs/configuration.md for what each does; the defaults are plain GRPO."""

    model: str = "policy"
    """Name of the model that is improved: the new version is weights/<model>/..."""
    objective: Literal["policy", "value"] = "policy"
    optimizer: OptimizerParams = OptimizerParams()

    advantage: str = "grpo"
    """A name, or the user's own `file.py:function`, which takes what functions/algorithms/advantages.py names."""
    advantage_options: Mapping[str, Any] = field(default_factory=dict)
    loss: str = "vanilla"
    """A name, or the user's own `file.py:function`, which takes what functions/algorithms/policy_losses.py names."""
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    aggregation: str = "token-mean"
    aggregation_norm: float | None = None
    """Constant of seq-mean-token-sum-norm; None: max_response_length."""
    score: ScoreParams = ScoreParams()
    kl: KlParams | None = None
    entropy_coef: float = 0.0
    adaptive_entropy: AdaptiveEntropyParams | None = None
    """A bonus that is there only while the entropy is low, and grows until it is not (algorithms/entropy.py)."""
    top_entropy_quantile: float = 1.0
    """Share of the tokens, those of highest entropy before the step, that have a policy gradient."""
    off_policy_mask_threshold: float | None = None
    """Samples with a negative advantage whose mean log(pi_rollout / pi) is above it have no policy gradient."""
    resample: ResampleParams | None = None
    """PF-PPO: a step's samples are drawn anew by their scores."""
    correction: CorrectionParams | None = None
    cost: CostParams | None = None
    filter_groups: bool = False
    """Groups whose scores are all equal train nothing (DAPO's dynamic sampling samples others in their place)."""
    values: str = "values"
    """Token column of the critic's values before the step."""
    value_clip: float | None = 0.5
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    banned: tuple[tuple[int, ...], ...] = ()
    """Those of sampling, as `temperature`: what the rollout's log-probabilities are compared with."""
    max_response_length: int | None = None
    dropped: tuple[tuple[int, int], ...] = ()
    """(group, index) of samples without a score (on_error = "drop"): they are left out."""

    epochs: int = 1
    mini_batches: int = 1
    """Optimizer steps per epoch; a prompt's samples are never divided between two."""
    micro_batch_tokens: int | None = None
    """Computed tokens per forward pass: changes memory and speed, never the result; None: 1024 CPU, 16384 GPU."""
    max_rollout_logprob_diff: Literal["off"] | float | None = None
    """Bound on rollout_corr/abs_diff_mean: above it the samples are not this version's, and nothing is trained. None:
    by dtype (ROLLOUT_BOUNDS)."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: matrix products in bfloat16, published weights too; the optimizer works on float32 master weights."""
    gradient_checkpointing: bool = False
    durable_state: bool = True
    """Whether the store has the optimizer's state when the call ends; else the node's tier, where there is one."""
    lora: LoraParams | None = None

    def __post_init__(self) -> None:
        if ":" not in self.advantage:
            _one_of("advantage", self.advantage, ADVANTAGES)
            check_options("advantage_options", self.advantage, self.advantage_options, ADVANTAGE_OPTIONS)
        if ":" not in self.loss:
            _one_of("loss", self.loss, POLICY_LOSSES)
            check_options("loss_options", self.loss, self.loss_options, LOSS_OPTIONS)
        _one_of("aggregation", self.aggregation, AGGREGATIONS)
        fixed = FIXED_AGGREGATION.get(self.loss, self.aggregation)
        if self.objective == "policy" and fixed != self.aggregation:
            raise ValueError(f"aggregation: got {self.aggregation!r}, loss {self.loss!r} is always {fixed}")
        if not 0 < self.top_entropy_quantile <= 1:
            raise ValueError(f"top_entropy_quantile: got {self.top_entropy_quantile}, wants a share in (0, 1]")
        if self.top_entropy_quantile < 1 and (self.entropy_coef or self.adaptive_entropy or self.loss == "geo_mean"):
            raise ValueError("top_entropy_quantile: wants no entropy bonus and a loss of tokens (not 'geo_mean')")
        if not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(f"top_p and top_k: got {self.top_p} and {self.top_k}, want one in (0, 1] and at least 0")
        if self.max_rollout_logprob_diff not in (None, "off"):
            _above_zero(max_rollout_logprob_diff=float(self.max_rollout_logprob_diff or 0))
        _above_zero(temperature=self.temperature, epochs=self.epochs, mini_batches=self.mini_batches)
        if self.micro_batch_tokens is not None:
            _above_zero(micro_batch_tokens=self.micro_batch_tokens)
        if self.aggregation_norm is not None:
            _above_zero(aggregation_norm=self.aggregation_norm)
        if self.value_clip is not None:
            _above_zero(value_clip=self.value_clip)
        buffer, most = self.score.overlong_buffer, self.max_response_length
        if buffer is not None and most is None:
            raise ValueError("score.overlong_buffer: wants max_response_length")
        if buffer is not None and most is not None and buffer > most:
            raise ValueError(f"score.overlong_buffer: got {buffer}, wants at most max_response_length, which is {most}")
        if self.aggregation == "seq-mean-token-sum-norm" and self.norm is None:
            raise ValueError("aggregation: seq-mean-token-sum-norm wants aggregation_norm or max_response_length")
        if self.objective == "value" and self.lora is not None:
            raise ValueError("lora: adapters are for the policy objective; a critic's head has to be trained whole")
        if self.objective == "value" and self.advantage not in ("gae", "bradley_terry"):
            raise ValueError(f"objective 'value' wants advantage 'gae', got {self.advantage!r}")
        if self.advantage in PAIRS and not self.single_step:
            raise ValueError(f"epochs and mini_batches: advantage {self.advantage!r} wants 1: its step is its batch")
        if self.advantage in PAIRS and self.aggregation != "seq-mean-token-sum":
            raise ValueError(f"aggregation: advantage {self.advantage!r} wants 'seq-mean-token-sum'")
        if self.cost is not None and self.advantage != "gae":
            raise ValueError(f"cost wants advantage 'gae', got {self.advantage!r}")

    @property
    def norm(self) -> float | None:
        if self.aggregation_norm is None and self.max_response_length is not None:
            return float(self.max_response_length)
        return self.aggregation_norm

    @property
    def rollout_bound(self) -> float | None:
        return rollout_bound(self.max_rollout_logprob_diff, self.dtype)

    @property
    def single_step(self) -> bool:
        """Whether one optimizer step is made, so that its only forward pass is by the weights before it."""
        return self.epochs * self.mini_batches == 1

    @property
    def rejects(self) -> bool:
        """Whether samples or tokens may leave the mask for the mismatch of engine and trainer."""
        return self.correction is not None and bool(self.correction.reject)

    @property
    def corrects_whole(self) -> bool:
        """Whether the correction is of all samples at once, before the first gradient: what is rejected is in no
        denominator, weights are divided by their mean, a token baseline weighs by them."""
        if self.correction is None or self.objective == "value":
            return False
        return self.rejects or self.correction.normalize or self.token_baseline

    @property
    def wants_old(self) -> bool:
        """Whether the log-probabilities of the weights before the step are computed before its first gradient: they
        change within it, or are part of what is trained on."""
        in_reward = self.kl is not None and self.kl.where == "reward"
        mean = self.correction is not None and self.correction.normalize
        needed = in_reward or self.rejects or mean or self.advantage in ("distillation", *PAIRS)
        return not self.single_step or needed or self.wants_more_of_old

    @property
    def wants_more_of_old(self) -> bool:
        """Whether more is wanted of the weights before the step than log-probabilities, which others may have said."""
        return self.top_entropy_quantile < 1 or self.loss in COVARIANCE or self.token_baseline

    @property
    def penalized(self) -> bool:
        """Whether sampling looked at the tokens before."""
        return self.repetition_penalty != 1 or bool(self.banned)

    @property
    def given(self) -> bool:
        """Whether a data set gives the responses: no engine has sampled them, and nobody scores them."""
        return self.advantage in GIVEN

    @property
    def token_baseline(self) -> bool:
        return self.advantage.endswith("optimal_token_baseline")

    @property
    def streams(self) -> bool:
        """Whether a sample's gradient needs no more than its own prompt group, up to the batch's denominator: then the
        step can begin while other groups are still generated (functions/train/streamed.py)."""
        if not self.single_step or self.cost or self.resample or ":" in self.advantage + self.loss:
            return False
        if self.advantage in PAIRS:
            return False
        if self.objective == "value":  # returns are not whitened; a fixed KL in the reward is the sample's own
            return self.kl is None or self.kl.target is None
        if self.wants_old:
            return False
        options = self.advantage_options
        if (self.advantage == "gae" and options.get("whiten_advantages", True)) or options.get("scale") == "batch":
            return False
        return self.advantage in ("grpo", "dr_grpo", "rloo", "remax", "gae", "opo", "grpo_passk", "sft")

    def to_json(self) -> Json:
        return asdict(self)

    def over(self, changes: Mapping[str, Any]) -> TrainParams:
        """With `changes` (JSON, whole values) instead. Raises FatalError as `from_json`."""
        return TrainParams.from_json(self.to_json() | dict(changes)) if changes else self

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TrainParams:
        """Raises FatalError naming the key, what it got and what would be right."""
        return parse(cls, value, "params")


OWN = ("optimizer", "model", "objective", "temperature", "top_p", "top_k", "min_p",
       "repetition_penalty", "banned", "max_response_length", "dropped", "epochs",
       "mini_batches", "micro_batch_tokens", "dtype", "gradient_checkpointing", "durable_state", "lora")  # fmt: skip
"""Params that a job says in other sections than [algorithm]."""
