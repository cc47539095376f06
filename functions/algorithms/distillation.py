"""Distillation from a teacher's most probable tokens."""

import torch
from torch import Tensor

from functions.algorithms.aggregation import Totals, aggregate, token_mean
from functions.algorithms.metrics import Metrics
from functions.algorithms.ragged import is_trained


def forward_kl_topk(
    *,
    topk_logprobs: Tensor,
    teacher_logprobs: Tensor,
    segment: Tensor,
    mask: Tensor,
    totals: Totals,
    aggregation: str,
    weights: Tensor | None = None,
    least_logprob: float = -10.0,
    most_loss: float = 10.0,
) -> tuple[Tensor, Metrics]:
    """max(0, sum_k p_k (log p_k - log q_k)) at each token, over the teacher's K most probable ones.

    topk_logprobs [N, K]     log q of the student, differentiable; teacher_logprobs [N, K] log p
    least_logprob, most_loss  bounds of the log-probabilities and of a token's loss
    GKD (arXiv:2306.13649); verl 0.9.1 `verl/trainer/distillation/fsdp/losses.py:compute_forward_kl_topk`
    (log_prob_min_clamp, loss_max_clamp). Metrics: actor/pg_loss, distillation/student_mass, distillation/teacher_mass.
    """
    trained = is_trained(mask)
    teacher, student = (
        torch.where(trained[:, None], values, torch.zeros_like(values))
        for values in (teacher_logprobs.detach(), topk_logprobs)
    )
    masses = {"student_mass": student.detach().exp().sum(-1), "teacher_mass": teacher.exp().sum(-1)}
    for name, values in (("topk_logprobs", student), ("teacher_logprobs", teacher)):
        if bool((bad := torch.isnan(values.detach()).any(-1)).any()):
            raise ValueError(f"{name}: nan in sequence {int(segment[bad.nonzero()[0, 0]])}; must be finite")
    teacher, student = teacher.clamp(min=least_logprob), student.clamp(min=least_logprob)
    losses = (teacher.exp() * (teacher - student)).sum(-1).clamp(min=0.0, max=most_loss)
    if weights is not None:
        losses = losses * weights.detach()
    loss = aggregate(losses=losses, mask=mask, segment=segment, totals=totals, aggregation=aggregation)
    shares = {f"distillation/{name}": token_mean(mass, mask, totals) for name, mass in masses.items()}
    return loss, {"actor/pg_loss": loss.detach()} | shares
