"""Safe RLHF: maximise reward subject to an expected cost below a limit (arXiv:2310.12773).

    max_pi min_{lambda >= 0}  J_R(pi) - lambda * (J_C(pi) - limit)
As PKU-Alignment/safe-rlhf `safe_rlhf/algorithms/ppo_lag/trainer.py:PPOLagTrainer`.
"""

import math

from torch import Tensor


def update_multiplier(*, multiplier: float, mean_cost: float, limit: float, lr: float, maximum: float) -> float:
    """lambda after one step of gradient ascent on ln lambda: ln lambda += lr * lambda * (mean_cost - limit).

    `mean_cost` is the mean cost score of the sampled sequences. The result lies in (0, maximum].
    """
    if not multiplier > 0 or not maximum >= multiplier:
        raise ValueError(f"lagrangian: multiplier must lie in (0, maximum = {maximum}], got {multiplier}")
    if not math.isfinite(mean_cost):
        raise ValueError(f"lagrangian: mean cost is {mean_cost}, must be finite")
    log_multiplier = math.log(multiplier) + lr * multiplier * (mean_cost - limit)
    return max(math.exp(min(log_multiplier, math.log(maximum))), 1e-8)


def mix_advantages(*, rewards: Tensor, costs: Tensor, multiplier: float) -> Tensor:
    """(A_R - lambda * A_C) / (1 + lambda): `rewards` and `costs` are the advantages of each, same shape.

    The denominator keeps the scale of the policy loss while lambda moves.
    """
    if not math.isfinite(multiplier) or multiplier < 0:
        raise ValueError(f"lagrangian: multiplier must be finite and >= 0, got {multiplier}")
    return (rewards - multiplier * costs) / (1.0 + multiplier)
