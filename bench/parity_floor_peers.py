"""The peers' side of bench/parity_floor.py: the algorithms that came after the first ones. See parity_peers.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

Tensor = torch.Tensor
BOUNDED = ("gpg", "dppo_tv", "dppo_kl", "sapo")
"""verl's losses that clamp log-ratios, or have none."""


def verl_losses(batch: Any, put: Any) -> None:
    from verl.trainer.ppo import core_algos  # type: ignore[import-not-found]
    from verl.workers.config import FSDPActorConfig  # type: ignore[import-not-found]
    from verl.workers.config.actor import PolicyLossConfig  # type: ignore[import-not-found]

    ranges = {"dppo_tv": (0.03, 0.05), "dppo_kl": (0.002, 0.003), "geo_mean": (0.1, 0.15), "clip_cov": (0.2, 0.28)}
    config_of_loss = PolicyLossConfig(
        clip_cov_ratio=1.0, clip_cov_lb=0.001, clip_cov_ub=0.05, kl_cov_ratio=0.2, ppo_kl_coef=0.3, dro_beta=0.4
    )
    for name in (*BOUNDED, "clip_cov", "kl_cov", "geo_mean", "dro"):
        if batch.arrays["overflow"][0] and name not in BOUNDED:
            continue
        low, high = ranges.get(name, (0.2, 0.2))
        config = FSDPActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=low, clip_ratio_high=high,
            clip_ratio_c=3.0, policy_loss=config_of_loss,
        )  # fmt: skip
        for weights in (None, batch.pad("weights")):
            leaf = batch.leaf("logprobs")
            loss, metrics = core_algos.get_policy_loss_fn(name)(
                old_log_prob=batch.pad("old_logprobs"), log_prob=leaf, advantages=batch.pad("advantages"),
                response_mask=batch.mask, loss_agg_mode="token-mean", config=config, rollout_is_weights=weights,
            )  # fmt: skip
            if name == "geo_mean":  # torch.mean over all sequences, masked ones too
                loss = loss * len(batch.lengths) / (batch.mask.sum(-1) > 0).sum()
            torch.autograd.backward(loss)
            key = f"verl/{name}/{'weighted' if weights is not None else 'plain'}"
            put(f"{key}/loss", loss)
            put(f"{key}/gradient", batch.flat(leaf.grad))
        if name in ("dppo_tv", "dppo_kl", "geo_mean"):
            for metric in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower"):
                put(f"verl/{name}/{metric}", metrics[metric])


def verl_advantages(batch: Any, put: Any) -> None:
    from verl.trainer.ppo import core_algos

    rewards, mask, group = batch.token_rewards(), batch.mask, batch.group
    outcome = torch.zeros_like(rewards)
    outcome[:, 0] = batch.scores
    scaled: Any = {"norm_adv_by_std_in_grpo": True}
    both: Any = {"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [0.7, 1.3]}
    ends = torch.arange(mask.shape[1] + 1)[None] <= torch.from_numpy(batch.lengths)[:, None]
    place = {"prompts": torch.ones(len(batch.lengths), 1), "attention_mask": ends.long()}
    values = {"a": batch.arrays["scores"], "b": batch.arrays["second_score"]}
    token = {"old_log_probs": batch.pad("old_logprobs").double(), "sum_pi_squared": batch.pad("squared_mass")}
    results = {
        "opo": core_algos.compute_opo_outcome_advantage(outcome.clone(), mask, group),
        "gpg": core_algos.compute_gpg_outcome_advantage(outcome.clone(), mask, group),
        "grpo_passk": core_algos.compute_grpo_passk_outcome_advantage(outcome.clone(), mask, group, config=scaled),
        "gdpo": core_algos.compute_gdpo_outcome_advantage(
            outcome.clone(), mask, group, config=both, non_tensor_batch=values, batch=place
        ),
    }
    kinds = {
        "optimal_token_baseline": core_algos.compute_optimal_token_baseline_advantage,
        "tir_optimal_token_baseline": core_algos.compute_multi_turn_optimal_token_baseline_advantage,
    }
    for name, function in kinds.items():
        for tail in (True, False):
            for weights in (None, batch.pad("weights")):
                key = f"{name}/{tail}/{weights is not None}"
                results[key] = function(
                    rewards.double(), mask, group, rollout_is_weights=weights, handle_zero_tail=tail, **token
                )
    trained = (mask.sum(-1) > 0).numpy()
    alone = np.array([trained[group == number].sum() < 2 for number in group])  # this project: advantage 0
    for name, (advantages, returns) in results.items():
        if name.startswith("tir"):
            advantages[torch.from_numpy(alone)] = 0.0
        put(f"verl/advantage/{name}", batch.flat(advantages))
        if name.endswith("baseline/True/False"):
            put(f"verl/advantage/{name}/returns", batch.flat(returns))


def verl_rest(batch: Any, put: Any) -> None:
    """Normalised weights, PF-PPO's weights, top-k distillation."""
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo import rollout_corr_helper as helper

    log_ratio = batch.pad("logprobs") - batch.pad("rollout_logprobs")
    for level in ("token", "sequence"):
        weights, _ = helper.compute_rollout_correction_weights(log_ratio, batch.mask, level, "1.2", True)
        put(f"verl/correction/{level}/normalised", batch.flat(weights))

    class Rows(dict[str, Tensor]):
        batch_size = 0

    caught: list[Tensor] = []
    draw = torch.multinomial
    for method in ("pow", "max_min", "max_random"):
        rows = Rows(token_level_scores=batch.scores[:, None])
        data = SimpleNamespace(batch=rows, non_tensor_batch={}, meta_info={})
        torch.multinomial = lambda w, n, **k: caught.append(w) or draw(w, n, **k)  # type: ignore[assignment,func-returns-value,misc]
        try:
            core_algos.compute_pf_ppo_reweight_data(data, method, 1.5)
        finally:
            torch.multinomial = draw
        put(f"verl/pf_ppo/{method}", caught[-1])
    # by its file: its package imports data sets, and what they want
    path = Path(core_algos.__file__).parents[3] / "verl/trainer/distillation/fsdp/losses.py"
    spec = importlib.util.spec_from_file_location("fsdp_losses", path)
    assert spec is not None
    assert spec.loader is not None
    distillation: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(distillation)
    leaf = torch.from_numpy(batch.arrays["logits"]).requires_grad_()
    teacher = torch.log_softmax(torch.from_numpy(batch.arrays["teacher_logits"]), -1).topk(3)
    for least in (-10.0, -1.5):
        settings = SimpleNamespace(use_chunked_topk=False, log_prob_min_clamp=least)
        found = distillation.compute_forward_kl_topk(
            student_logits=leaf[None],
            teacher_topk_log_probs=torch.nested.as_nested_tensor([teacher.values], layout=torch.jagged),
            teacher_topk_ids=torch.nested.as_nested_tensor([teacher.indices], layout=torch.jagged),
            config=SimpleNamespace(distillation_loss=settings),  # type: ignore[arg-type]
            data_format="thd",
        )
        losses = found["distillation_losses"][0].clamp_min(0.0).clamp(max=10.0)  # as its caller does
        mask = torch.from_numpy(batch.arrays["mask"])
        loss = (losses * mask).sum() / mask.sum()
        (gradient,) = torch.autograd.grad(loss, leaf)
        put(f"verl/forward_kl_topk/{least}/loss", loss)
        put(f"verl/forward_kl_topk/{least}/gradient", gradient)


def trl(batch: Any, put: Any) -> None:
    from parity_peers import trl_inputs, trl_trainer
    from trl.trainer.grpo_trainer import GRPOTrainer  # type: ignore[import-not-found]
    from trl.trainer.utils import nanstd  # type: ignore[import-not-found]

    # scale_rewards="batch", of _generate_and_score_completions (a method that also samples)
    means = torch.stack([batch.scores[torch.from_numpy(batch.group == number)].mean() for number in batch.group])
    put("trl/advantage/batch", (batch.scores - means) / (nanstd(batch.scores) + 1e-4))
    if batch.arrays["overflow"][0]:
        return
    advantages = torch.from_numpy(batch.arrays["sequence_advantages"])[:, None]
    put("trl/off_policy", GRPOTrainer.get_off_policy_mask(
        advantages, batch.pad("logprobs"), batch.pad("rollout_logprobs"), batch.mask, 0.01
    ))  # fmt: skip
    settings: dict[str, Any] = {
        "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0, "use_bias_correction_kl": False, "steps_per_generation": 1,
        "delta": None,
    }  # fmt: skip
    cases: dict[str, dict[str, Any]] = {
        "sapo": {"loss_type": "sapo"},
        "vespo": {"loss_type": "vespo"},
        "vespo/weights": {"loss_type": "vespo", "use_vllm": True},
        "quantile": {"loss_type": "bnpo", "top_entropy_quantile": 0.3},
        "quantile/grpo": {"loss_type": "grpo", "top_entropy_quantile": 0.3},
        "off_policy": {"loss_type": "bnpo", "off_policy_mask_threshold": 0.01},
    }
    for name, changes in cases.items():
        leaf, entropy = batch.leaf("logprobs"), batch.leaf("entropy")
        trainer = trl_trainer(leaf, entropy, args=SimpleNamespace(**settings), **changes)
        for method in ("get_off_policy_mask", "get_gamma_weights"):
            setattr(trainer, method, getattr(GRPOTrainer, method))
        trainer.get_high_entropy_mask = lambda *a, t=trainer: GRPOTrainer.get_high_entropy_mask(t, *a)
        inputs = trl_inputs(batch) | {"sampling_per_token_logps": batch.pad("rollout_logprobs")}
        if name == "vespo/weights":
            inputs["importance_sampling_ratio"] = torch.where(batch.mask == 1, batch.pad("weights") + 0.1, 1.0)
        else:
            del inputs["importance_sampling_ratio"]
        loss = GRPOTrainer._compute_loss(trainer, None, inputs)
        torch.autograd.backward(loss)
        put(f"trl/{name}/loss", loss)
        put(f"trl/{name}/gradient", batch.flat(leaf.grad))
    adaptive = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "_last_world_entropy": float("inf")}
    leaf, entropy = batch.leaf("logprobs"), batch.leaf("entropy")
    limits = SimpleNamespace(
        **settings, entropy_target=0.5, entropy_coef_delta=0.004, entropy_coef_max=0.016, entropy_coef_min=0.0
    )
    changes = {"args": limits, "_entropy_bonus_enabled": True, "_entropy_window_stats": None, **adaptive}
    trainer = trl_trainer(leaf, entropy, loss_type="bnpo", **changes)
    trainer.accelerator.sync_gradients = True
    for number, factor in enumerate((0.2, 0.3, 3.0, 0.1)):
        trainer._get_per_token_logps_and_entropies = lambda *a, f=factor, **k: (leaf, entropy * f, None)
        put(f"trl/adaptive/{number}/loss", GRPOTrainer._compute_loss(trainer, None, trl_inputs(batch)))
        put(f"trl/adaptive/{number}/coef", torch.tensor(trainer.entropy_coef))


ALL = (verl_losses, verl_advantages, verl_rest, trl)
