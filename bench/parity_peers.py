"""The peers' side of bench/parity.py, run by it inside a virtual environment that has verl 0.9.1 and TRL 1.16.0.

Reads batches (npz), hands them padded to the peers' own functions, writes what those return (npz) under the names
that `ours` in bench/parity.py uses. Nothing of this project is imported here.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import parity_floor_peers
import torch

Tensor = torch.Tensor
MODES = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
NORM = 16


class Padded:
    """One batch in the peers' form: [S, T] tensors, and the way back to [N]."""

    def __init__(self, arrays: dict[str, npt.NDArray[Any]]) -> None:
        self.lengths = arrays["lengths"].astype(int)
        self.group = arrays["group"]
        self.scores = torch.from_numpy(arrays["scores"])
        self.baselines = torch.from_numpy(arrays["baselines"])
        self.arrays = arrays
        self.mask = self.pad("mask")

    def pad(self, name: str) -> Tensor:
        rows = np.split(self.arrays[name], np.cumsum(self.lengths)[:-1])
        out = torch.zeros(len(rows), int(self.lengths.max()))
        for row, values in enumerate(rows):
            out[row, : len(values)] = torch.from_numpy(values)
        return out

    def leaf(self, name: str) -> Tensor:
        return self.pad(name).requires_grad_()

    def flat(self, padded: Tensor | None) -> npt.NDArray[Any]:
        """[N], 0 under the mask: peers leave what they like there."""
        assert padded is not None
        rows = [(padded * self.mask)[row, :length] for row, length in enumerate(self.lengths)]
        return torch.cat(rows).detach().numpy()

    def token_rewards(self) -> Tensor:
        rewards = self.pad("token_rewards")
        for row, length in enumerate(self.lengths):
            rewards[row, length - 1] += self.scores[row]
        return rewards


def verl_losses(batch: Padded, put: Any) -> None:
    from verl.trainer.ppo import core_algos  # type: ignore[import-not-found]
    from verl.workers.config import FSDPActorConfig  # type: ignore[import-not-found]

    ranges = {"vanilla": (0.2, 0.28), "gspo": (3e-2, 4e-2), "cispo": (1.0, 0.5)}
    for name, (low, high) in ranges.items():
        config = FSDPActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            clip_ratio_low=low,
            clip_ratio_high=high,
            clip_ratio_c=3.0,
        )
        config.global_batch_info["loss_scale_factor"] = NORM
        for mode in MODES if name != "gspo" else ("seq-mean-token-mean",):  # in all others 0.9.1 is alone
            for weights in (None, batch.pad("weights")):
                leaf = batch.leaf("logprobs")
                loss, metrics = core_algos.get_policy_loss_fn(name)(
                    old_log_prob=batch.pad("old_logprobs"),
                    log_prob=leaf,
                    advantages=batch.pad("advantages"),
                    response_mask=batch.mask,
                    loss_agg_mode=mode,
                    config=config,
                    rollout_is_weights=weights,
                )
                torch.autograd.backward(loss)
                key = f"verl/{name}/{mode}/{'weighted' if weights is not None else 'plain'}"
                put(f"{key}/loss", loss)
                put(f"{key}/gradient", batch.flat(leaf.grad))
        for metric in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl"):
            put(f"verl/{name}/{metric}", metrics[metric])
    for mode in MODES:
        put(
            f"verl/agg_loss/{mode}",
            core_algos.agg_loss(batch.pad("advantages"), batch.mask, mode, loss_scale_factor=NORM),
        )
        leaf = batch.leaf("values")
        loss, fraction = core_algos.compute_value_loss(
            leaf, batch.pad("returns"), batch.pad("old_values"), batch.mask, 0.1, mode, loss_scale_factor=NORM
        )
        torch.autograd.backward(loss)
        put(f"verl/value_loss/{mode}/loss", loss)
        put(f"verl/value_loss/{mode}/gradient", batch.flat(leaf.grad))
        put(f"verl/value_loss/{mode}/clipfrac", fraction)
    for kind in ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"):
        leaf = batch.leaf("logprobs")
        estimate = core_algos.kl_penalty(leaf, batch.pad("reference_logprobs"), kind)
        torch.autograd.backward((estimate * batch.mask).sum())
        put(f"verl/kl/{kind}", batch.flat(estimate))
        put(f"verl/kl/{kind}/gradient", batch.flat(leaf.grad))
    controller = core_algos.AdaptiveKLController(0.05, 0.1, 200)
    for kl, sequences in ((0.3, 16), (0.11, 32), (0.02, 64)):
        controller.update(kl, sequences)
        put(f"verl/adaptive_kl/{kl}", controller.value)


def verl_advantages(batch: Padded, put: Any) -> None:
    from verl.trainer.ppo import core_algos
    from verl.utils import torch_functional  # type: ignore[import-not-found]

    rewards, mask = batch.token_rewards(), batch.mask
    outcome = torch.zeros_like(rewards)
    outcome[:, 0] = batch.scores
    gamma_config = SimpleNamespace(gamma=0.97)
    group = batch.group
    results = {
        "gae": core_algos.compute_gae_advantage_return(rewards.double(), batch.pad("values"), mask, 0.99, 0.95),
        "grpo": core_algos.compute_grpo_outcome_advantage(outcome, mask, group),
        "grpo/epsilon": core_algos.compute_grpo_outcome_advantage(outcome, mask, group, epsilon=1e-4),
        "dr_grpo": core_algos.compute_grpo_outcome_advantage(outcome, mask, group, norm_adv_by_std_in_grpo=False),
        "rloo": core_algos.compute_rloo_outcome_advantage(outcome, mask, group),
        "remax": core_algos.compute_remax_outcome_advantage(rewards, batch.baselines, mask),
        "reinforce_plus_plus": core_algos.compute_reinforce_plus_plus_outcome_advantage(
            rewards.double(), mask, config=gamma_config
        ),
        "reinforce_plus_plus_baseline": core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
            outcome, mask, group
        ),
    }
    for name, (advantages, returns) in results.items():
        put(f"verl/advantage/{name}", batch.flat(advantages))
        put(f"verl/advantage/{name}/returns", batch.flat(returns))
    for shift in (True, False):
        put(
            f"verl/whiten/{shift}",
            batch.flat(torch_functional.masked_whiten(batch.pad("advantages"), mask, shift_mean=shift)),
        )


def verl_correction(batch: Padded, put: Any) -> None:
    from verl.trainer.ppo import rollout_corr_helper as helper
    from verl.utils import torch_functional

    trainer, rollout = batch.pad("logprobs"), batch.pad("rollout_logprobs")
    for level in ("token", "sequence"):
        for spec in ("1.2", "0.8_1.3"):
            weights, metrics = helper.compute_rollout_correction_weights(trainer - rollout, batch.mask, level, spec)
            put(f"verl/correction/{level}/{spec}/weights", batch.flat(weights))
            for name in ("rollout_is_mean", "rollout_is_eff_sample_size"):
                put(f"verl/correction/{level}/{spec}/{name}", metrics[name])
    for statistic in sorted(helper.SUPPORTED_ROLLOUT_RS_OPTIONS):
        spec = "0.9_1.15" if statistic.endswith("k1") else "0.02"
        mask, metrics = helper.compute_rollout_rejection_mask(trainer - rollout, batch.mask, statistic, spec)
        put(f"verl/correction/reject/{statistic}/mask", batch.flat(mask))
        put(f"verl/correction/reject/{statistic}/masked_fraction", metrics["rollout_rs_masked_fraction"])
    # verl counts a masked sequence with perplexity 1; an exponential of 15 has no six digits in fp32
    if bool((batch.mask.sum(-1) > 0).all()) and not batch.arrays["overflow"][0]:
        for name, value in helper.compute_offpolicy_metrics(trainer, rollout, batch.mask).items():
            put(f"verl/correction/{name}", value)
    logits = torch.from_numpy(batch.arrays["logits"])
    targets = torch.from_numpy(batch.arrays["targets"])
    put("verl/logprobs", torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0])
    put("verl/entropy", torch_functional.entropy_from_logits(logits))


def trl_trainer(leaf: Tensor, entropy: Tensor, **changes: Any) -> SimpleNamespace:
    """What GRPOTrainer._compute_loss reads of a trainer, over `changes`."""
    one = SimpleNamespace(
        num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x, device=torch.device("cpu"),
        sync_gradients=False, pad_across_processes=lambda x, **k: x, gather_for_metrics=lambda x: x,
    )  # fmt: skip
    return SimpleNamespace(**{
        "importance_sampling_level": "token", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.28,
        "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "use_vllm": False,
        "vllm_importance_sampling_correction": True, "aux_loss_enabled": False, "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False, "entropy_coef": 0.01, "max_completion_length": NORM,
        "model": SimpleNamespace(training=True), "current_gradient_accumulation_steps": 1, "accelerator": one,
        "_metrics": {"train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *a, **k: (leaf, entropy, None),
    } | changes)  # fmt: skip


def trl_inputs(batch: Padded) -> dict[str, Tensor]:
    ones = torch.ones(len(batch.lengths), 1)
    return {
        "prompt_ids": ones,
        "prompt_mask": ones,
        "completion_ids": torch.ones_like(batch.mask),
        "completion_mask": batch.mask,
        "advantages": torch.from_numpy(batch.arrays["sequence_advantages"]),
        "old_per_token_logps": batch.pad("old_logprobs"),
        "ref_per_token_logps": batch.pad("reference_logprobs"),
        "importance_sampling_ratio": batch.pad("weights"),
        "num_items_in_batch": batch.mask.sum(),
    }


def trl_losses(batch: Padded, put: Any) -> None:
    from trl.trainer.grpo_trainer import GRPOTrainer  # type: ignore[import-not-found]

    if batch.arrays["overflow"][0]:
        return
    cases = {
        "grpo": ("grpo", "token", None, 0.0, None),
        "grpo/kl": ("grpo", "token", None, 0.04, None),
        "grpo/sequence": ("grpo", "sequence", None, 0.0, None),
        "bnpo": ("bnpo", "token", None, 0.0, None),
        "bnpo/delta": ("bnpo", "token", 3.0, 0.0, None),
        "bnpo/rollout weights": ("bnpo", "token", None, 0.0, "weights"),
        "bnpo/entropy": ("bnpo", "token", None, 0.0, "entropy"),
        "dapo": ("dapo", "token", None, 0.0, None),
        "dr_grpo": ("dr_grpo", "token", None, 0.0, None),
        "luspo": ("luspo", "token", None, 0.0, None),
        "cispo": ("cispo", "token", None, 0.0, None),
    }
    for name, (loss_type, level, delta, beta, extra) in cases.items():
        leaf, entropy = batch.leaf("logprobs"), batch.leaf("entropy")
        trainer = trl_trainer(
            leaf,
            entropy,
            loss_type=loss_type,
            importance_sampling_level=level,
            beta=beta,
            args=SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1),
            epsilon_high=1.5 if loss_type == "cispo" else 0.28,
            use_vllm=extra == "weights",
            _entropy_bonus_enabled=extra == "entropy",
        )
        inputs = trl_inputs(batch)
        loss = GRPOTrainer._compute_loss(trainer, None, inputs)
        torch.autograd.backward(loss)
        put(f"trl/{name}/loss", loss)
        put(f"trl/{name}/gradient", batch.flat(leaf.grad))
        if extra == "entropy":
            put(f"trl/{name}/entropy gradient", batch.flat(entropy.grad))


def main(source: str, target: str) -> None:
    arrays = dict(np.load(source))
    batches: dict[str, dict[str, npt.NDArray[Any]]] = defaultdict(dict)
    for name, array in arrays.items():
        batch, _, field = name.partition("/")
        batches[batch][field] = array
    outputs: dict[str, Any] = {}
    for name, fields in batches.items():
        batch = Padded(fields)

        def put(key: str, value: Any, name: str = name) -> None:
            if isinstance(value, Tensor):
                value = value.detach().numpy()
            outputs[f"{name}|{key}"] = np.asarray(value, dtype=np.float32)

        for compute in (verl_losses, verl_advantages, verl_correction, trl_losses, *parity_floor_peers.ALL):
            compute(batch, put)
    np.savez_compressed(target, **outputs)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
