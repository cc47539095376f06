"""What this project computes for the cases of parity_floor_peers.py; part of bench/parity.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functions.algorithms import covariance
from functions.algorithms.advantages import ADVANTAGES
from functions.algorithms.aggregation import Totals
from functions.algorithms.correction import mean_weight, on_policy, rollout_correction
from functions.algorithms.entropy import adaptive_entropy_coef, entropy_loss, high_entropy
from functions.algorithms.logprobs import Output, topk_logprobs
from functions.algorithms.policy_losses import POLICY_LOSSES
from functions.algorithms.ragged import per_token
from functions.algorithms.resample import resampling_weights
from functions.algorithms.rewards import token_rewards

OPTIONS: dict[str, dict[str, Any]] = {
    "gpg": {},
    "dppo_tv": {"clip_low": 0.03, "clip_high": 0.05, "ratio_cap": 3.0},
    "dppo_kl": {"clip_low": 0.002, "clip_high": 0.003, "ratio_cap": 3.0},
    "sapo": {},
    "clip_cov": {"clip_low": 0.2, "clip_high": 0.28},
    "kl_cov": {"kl_coef": 0.3},
    "geo_mean": {"clip_low": 0.1, "clip_high": 0.15},
    "dro": {"beta": 0.4},
}


def ours(batch: Any) -> dict[str, Tensor]:
    return _losses(batch) | _advantages(batch) | _rest(batch) | _trl(batch)


def _chosen(name: str, batch: Any) -> dict[str, Tensor]:
    if name not in ("clip_cov", "kl_cov"):
        return {}
    where = {"segment": batch.segment, "mask": batch.mask}
    found = covariance.covariances(logprobs=batch["logprobs"], advantages=batch["advantages"], **where)
    if name == "kl_cov":
        return {"chosen": covariance.largest(found, batch.mask, ratio=0.2)}
    return {"chosen": covariance.random_between(found, batch.mask, ratio=1.0, low=0.001, high=0.05, seed=0)}


def _losses(batch: Any) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name, options in OPTIONS.items():
        for weighted in (False, True):
            leaf = batch.leaf("logprobs")
            inputs = {key: batch[key] for key in ("old_logprobs", "advantages")} | _chosen(name, batch) | options
            inputs["weights"] = batch["weights"] if weighted else None
            loss, metrics = POLICY_LOSSES[name](logprobs=leaf, **inputs, **batch.where("token-mean"))
            key = f"verl/{name}/{'weighted' if weighted else 'plain'}"
            out[f"{key}/loss"] = loss
            (out[f"{key}/gradient"],) = torch.autograd.grad(loss, leaf)
        for metric in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower"):
            out[f"verl/{name}/{metric}"] = metrics[metric]
    return out


def _advantages(batch: Any) -> dict[str, Tensor]:
    place: dict[str, Any] = {"segment": batch.segment, "mask": batch.mask, "group": batch.group}
    names = ("opo", "gpg", "grpo_passk")
    found = {name: ADVANTAGES[name](scores=batch["scores"], **place) for name in names}
    both = torch.stack([batch["scores"], batch["second_score"]], -1)
    found["gdpo"] = ADVANTAGES["gdpo"](components=both, component_weights=torch.tensor([0.7, 1.3]), **place)
    rewards = token_rewards(
        scores=batch["scores"], kl=-batch["token_rewards"], kl_coef=1.0, segment=batch.segment, mask=batch.mask
    )
    tokens = {"rewards": rewards, "old_logprobs": batch["old_logprobs"], "squared_mass": batch["squared_mass"]}
    for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        for tail in (True, False):
            for weighted in (False, True):
                weights = batch["weights"] if weighted else None
                estimate = ADVANTAGES[name](**tokens, correction_weights=weights, zero_tail=tail, **place)
                found[f"{name}/{tail}/{weighted}"] = estimate
    out = {f"verl/advantage/{name}": estimate.advantages for name, estimate in found.items()}
    return out | {f"verl/advantage/{name}/returns": estimate.returns for name, estimate in found.items()}


def _rest(batch: Any) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    inputs = {name: batch[name] for name in ("logprobs", "rollout_logprobs")} | batch.where()
    where = {"segment": batch.segment, "mask": batch.mask}
    for level in ("token", "sequence"):
        raw = rollout_correction(level=level, cap=1.2, **inputs).weights
        scale = 1.0 / mean_weight(weights=raw, level=level, **where)
        out[f"verl/correction/{level}/normalised"] = rollout_correction(
            level=level, cap=1.2, scale=scale, **inputs
        ).weights
    for method in ("pow", "max_min", "max_random"):
        out[f"verl/pf_ppo/{method}"] = resampling_weights(scores=batch["scores"], method=method, power=1.5)
    teacher = torch.log_softmax(batch["teacher_logits"], -1).topk(3)
    for least in (-10.0, -1.5):
        leaf = batch.leaf("logits")
        student = topk_logprobs(hidden=leaf, output=Output(weight=torch.eye(7)), ids=teacher.indices, chunk_tokens=5)
        loss, _ = POLICY_LOSSES["forward_kl_topk"](
            topk_logprobs=student, teacher_logprobs=teacher.values, least_logprob=least, **batch.where("token-mean")
        )
        out[f"verl/forward_kl_topk/{least}/loss"] = loss
        (out[f"verl/forward_kl_topk/{least}/gradient"],) = torch.autograd.grad(loss, leaf)
    return out


def _trl(batch: Any) -> dict[str, Tensor]:
    """TRL divides by all sequences; `Totals.sequences` says so."""
    every = Totals(tokens=batch.totals.tokens, sequences=batch.sequences)
    where = {"segment": batch.segment, "mask": batch.mask}
    flat = per_token(values=batch["sequence_advantages"], segment=batch.segment)
    scaled = ADVANTAGES["grpo"](scores=batch["scores"], group=batch.group, scale="batch", epsilon=1e-4,
                                segment=torch.arange(batch.sequences), mask=torch.ones(batch.sequences))  # fmt: skip
    high = high_entropy(entropy=batch["entropy"], mask=batch.mask, share=0.3)
    near = on_policy(
        logprobs=batch["logprobs"], rollout_logprobs=batch["rollout_logprobs"], advantages=flat, threshold=0.01, **where
    )
    starts = batch["lengths"].long().cumsum(0) - batch["lengths"].long()
    out = {"trl/advantage/batch": scaled.advantages, "trl/off_policy": near[starts][:, None]}
    cases: dict[str, tuple[str, str, Tensor | None]] = {
        "sapo": ("sapo", "seq-mean-token-mean", None),
        "vespo": ("vespo", "token-mean", None),
        "vespo/weights": ("vespo", "token-mean", batch["weights"] + 0.1),
        "quantile": ("vanilla", "token-mean", high),
        "quantile/grpo": ("vanilla", "seq-mean-token-mean", high),
        "off_policy": ("vanilla", "token-mean", near),
    }
    for name, (function, mode, weights) in cases.items():
        leaf = batch.leaf("logprobs")
        options: dict[str, Any] = {"clip_high": 0.28, "dual_clip": None} if function == "vanilla" else {}
        loss, _ = POLICY_LOSSES[function](
            logprobs=leaf, old_logprobs=batch["old_logprobs"], advantages=flat, weights=weights, **options,
            **batch.where(mode, every),
        )  # fmt: skip
        out[f"trl/{name}/loss"] = loss
        (out[f"trl/{name}/gradient"],) = torch.autograd.grad(loss, leaf)
    coef, last = 0.01, float("inf")
    policy, _ = POLICY_LOSSES["vanilla"](
        logprobs=batch["logprobs"], old_logprobs=batch["old_logprobs"], advantages=flat, clip_high=0.28, dual_clip=None,
        **batch.where("token-mean", every),
    )  # fmt: skip
    for number, factor in enumerate((0.2, 0.3, 3.0, 0.1)):
        term, metrics = entropy_loss(
            entropy=batch["entropy"] * factor, coef=coef if last <= 0.5 else 0.0, **batch.where("token-mean", every)
        )
        last = float(metrics["actor/entropy"])
        coef = adaptive_entropy_coef(coef=coef, entropy=last, target=0.5, delta=0.004, least=0.0, most=0.016)
        out[f"trl/adaptive/{number}/loss"] = policy + term
        out[f"trl/adaptive/{number}/coef"] = torch.tensor(coef)
    return out
