"""The entropy bonus, a controller of its coefficient, and the tokens of high entropy."""

from torch import Tensor

from functions.algorithms.aggregation import Totals, aggregate
from functions.algorithms.metrics import Metrics
from functions.algorithms.ragged import checked


def entropy_loss(
    *, entropy: Tensor, segment: Tensor, mask: Tensor, totals: Totals, aggregation: str, coef: float
) -> tuple[Tensor, Metrics]:
    """-coef * aggregate(entropy [N]): added to the policy loss, it pays for entropy (A3C, arXiv:1602.01783).

    Metric: actor/entropy, without the coefficient (also with coef 0, where no gradient flows).
    """
    clean = checked("entropy", entropy if coef != 0 else entropy.detach(), segment, mask)
    mean = aggregate(losses=clean, mask=mask, segment=segment, totals=totals, aggregation=aggregation)
    return -coef * mean, {"actor/entropy": mean.detach()}


def adaptive_entropy_coef(
    *, coef: float, entropy: float, target: float, delta: float, least: float, most: float
) -> float:
    """The next coefficient: coef + delta where the entropy is at most `target`, else coef - delta, in [least, most].

    It is applied in a step only where the entropy of the step before was at most the target. Skywork-OR1
    (arXiv:2505.22312, section 4.4); TRL `trl/trainer/grpo_trainer.py:_compute_loss`, use_adaptive_entropy.
    """
    return min(coef + delta, most) if entropy <= target else max(coef - delta, least)


def high_entropy(*, entropy: Tensor, mask: Tensor, share: float) -> Tensor:
    """float32 [N]: 1 at the `share` of the trained tokens whose entropy is highest (and those equal to the last of it).

    Only they get a policy gradient: "Beyond the 80/20 rule" (arXiv:2506.01939, section 5.1). TRL
    `trl/trainer/grpo_trainer.py:get_high_entropy_mask`, top_entropy_quantile.
    """
    trained = mask == 1
    if not bool(trained.any()):
        return mask
    ordered = entropy[trained].double().sort().values
    place = (1.0 - share) * (ordered.numel() - 1)  # torch.quantile takes at most 2^24 numbers
    low, part = int(place), place - int(place)
    bound = ordered[low] + part * (ordered[min(low + 1, ordered.numel() - 1)] - ordered[low])
    return (trained & (entropy.double() >= bound)).to(mask.dtype)
