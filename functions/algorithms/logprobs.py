"""Log-probabilities and entropy from hidden states, without ever holding [N, V] logits.

    z = hidden @ weight.T + bias;  z = softcap * tanh(z / softcap);  z = z / temperature
    logprob_t = z[y_t] - logsumexp(z)
    entropy_t = logsumexp(z) - sum_v softmax(z)_v z_v
both with z shifted by its maximum, which keeps six digits at V = 150k (torch.log_softmax in fp32 keeps five).
A chunk of tokens at a time, forward and again in backward (the logits are computed twice, never kept). Peak memory is
a few [chunk_tokens, V] float32 buffers, instead of several [N, V]. The idea is cut cross-entropy's
(arXiv:2411.09009) at the granularity of tokens; values and gradients equal the naive form.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from functions.algorithms.penalties import NO_PENALTIES, History, Penalties, penalized
from functions.algorithms.truncation import WHOLE, Truncation, truncated


@dataclass(frozen=True, kw_only=True)
class Output:
    """How states become logits: softcap(hidden @ weight.T + bias) / temperature."""

    weight: Tensor
    """[V, H], the output embedding, full (gather a sharded one first)."""
    bias: Tensor | None = None
    """[V]"""
    softcap: float | None = None
    """Final logit soft-capping of Gemma-like models (Gemma 2, arXiv:2408.00118, section 2), before the temperature."""
    temperature: float = 1.0
    """That of sampling, so that a ratio is against the distribution that was sampled from."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature: must be above 0, got {self.temperature}")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap: must be above 0 (or None), got {self.softcap}")

    def chunks(self, hidden: Tensor, chunk_tokens: int) -> Iterator[tuple[slice, Tensor]]:
        """Rows of `hidden` [N, H], and their logits float32 [rows, V], which may be written to."""
        weight = self.weight.to(hidden.dtype)
        for start in range(0, hidden.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            yield rows, _logits(hidden[rows], weight, self.bias, self.softcap).div_(self.temperature)


def token_logprobs(
    *, hidden: Tensor, output: Output, targets: Tensor, chunk_tokens: int = 256
) -> tuple[Tensor, Tensor]:
    """(logprobs [N], entropy [N]) float32 of `targets` int64 [N], both differentiable.

    `hidden` [N, H] are the states that predict them (after the final norm). The matrix products run in their dtype,
    everything after in float32. The gradient of the entropy costs nothing where the entropy is not part of the loss.
    """
    weight = output.weight
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens: must be at least 1, got {chunk_tokens}")
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must be [N, H] and [V, H]")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets: shape {tuple(targets.shape)} must be [{hidden.shape[0]}]")
    outside = (targets < 0) | (targets >= weight.shape[0])
    if bool(outside.any()):
        token = int(outside.nonzero()[0, 0])
        raise ValueError(f"targets: {int(targets[token])} at token {token} is not in [0, {weight.shape[0]})")
    logprobs, entropy = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight.to(hidden.dtype), output.bias, targets, output.temperature, output.softcap, chunk_tokens
    )
    return logprobs, entropy


@torch.no_grad()
def kept_mass(
    *, hidden: Tensor, output: Output, truncation: Truncation, targets: Tensor | None = None,
    penalties: Penalties = NO_PENALTIES, history: History | None = None, chunk_tokens: int = 256,
) -> Tensor:  # fmt: skip
    """ln of the probability that min-p, top-k and top-p leave, [N] float32: 0 where they leave all. As
    `token_logprobs`. With `penalties` (of `history`, [N] rows) the `targets`' change of logit is in it.

    A token's log-probability minus this is the one under the distribution that was sampled from. It is finite also
    where rounding puts the sampled token just outside of what is kept.
    """
    mass = hidden.new_zeros(hidden.shape[0], dtype=torch.float32)
    if truncation == WHOLE and penalties == NO_PENALTIES:
        return mass
    for rows, logits in output.chunks(hidden, chunk_tokens):
        changed, start = logits, rows.start
        if penalties != NO_PENALTIES and history is not None and targets is not None:
            changed = penalized(logits, penalties, lambda row, start=start: history(start + row))  # type: ignore[misc]
            own = targets[rows, None]
            mass[rows] = (logits.gather(1, own) - changed.gather(1, own).clamp(min=-1e4))[:, 0]
        mass[rows] += truncated(changed, truncation).logsumexp(-1) - logits.logsumexp(-1)
    return mass


@torch.no_grad()
def squared_mass(*, hidden: Tensor, output: Output, chunk_tokens: int = 256) -> Tensor:
    """sum_v p(v)^2 of each token's distribution, [N] float32 (optimal_token_baseline). As `token_logprobs`."""
    mass = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
    for rows, logits in output.chunks(hidden, chunk_tokens):
        mass[rows] = torch.exp((2.0 * logits).logsumexp(-1) - 2.0 * logits.logsumexp(-1))
    return mass


def topk_logprobs(*, hidden: Tensor, output: Output, ids: Tensor, chunk_tokens: int = 256) -> Tensor:
    """ln p of the tokens `ids` int64 [N, K], [N, K] float32, differentiable. As `token_logprobs`: a chunk's logits are
    computed again in backward."""
    weight, bias, softcap = output.weight.to(hidden.dtype), output.bias, output.softcap

    def of_chunk(states: Tensor, tokens: Tensor) -> Tensor:
        logits = (states @ weight.T).float() + (0.0 if bias is None else bias.float())
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return torch.log_softmax(logits / output.temperature, -1).gather(-1, tokens)

    chunks = [slice(start, start + chunk_tokens) for start in range(0, hidden.shape[0], chunk_tokens)]
    return torch.cat([checkpoint(of_chunk, hidden[rows], ids[rows], use_reentrant=False) for rows in chunks])


@torch.no_grad()
def topk_of(*, hidden: Tensor, output: Output, count: int, chunk_tokens: int = 256) -> tuple[Tensor, Tensor]:
    """(ln p [N, K] float32, ids int64 [N, K]) of the `count` most probable tokens: a teacher's side of distillation."""
    found = list[tuple[Tensor, Tensor]]()
    for _, logits in output.chunks(hidden, chunk_tokens):
        top = logits.topk(min(count, logits.shape[-1]), -1)
        found.append((top.values - logits.logsumexp(-1, keepdim=True), top.indices))
    return torch.cat([values for values, _ in found]), torch.cat([ids for _, ids in found])


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    """float32 [chunk, V], soft-capped, before the temperature."""
    logits = (hidden @ weight.T).float()
    if bias is not None:
        logits += bias.float()
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    return logits


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        softcap: float | None,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        logprobs = hidden.new_empty(count, dtype=torch.float32)
        entropy = torch.empty_like(logprobs)
        largest = torch.empty_like(logprobs)
        log_sum = torch.empty_like(logprobs)
        for start in range(0, count, chunk_tokens):
            part = slice(start, min(start + chunk_tokens, count))
            logits = _logits(hidden[part], weight, bias, softcap).div_(temperature)
            largest[part] = logits.amax(-1)
            shifted = logits.sub_(largest[part, None])
            powers = shifted.exp()
            total = powers.sum(-1)
            log_sum[part] = total.log()
            logprobs[part] = shifted.gather(1, targets[part, None])[:, 0] - log_sum[part]
            entropy[part] = log_sum[part] - powers.mul_(shifted).sum(-1) / total
        ctx.save_for_backward(hidden, weight, bias, targets, largest, log_sum, entropy)
        ctx.options = (temperature, softcap, chunk_tokens)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, largest, log_sum, entropy = ctx.saved_tensors
        temperature, softcap, chunk_tokens = ctx.options
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        for start in range(0, hidden.shape[0], chunk_tokens):
            part = slice(start, min(start + chunk_tokens, hidden.shape[0]))
            log_p = _logits(hidden[part], weight, bias, softcap)
            slope = None if softcap is None else (log_p / softcap).square_().neg_().add_(1.0)
            log_p.div_(temperature).sub_(largest[part, None]).sub_(log_sum[part, None])
            probabilities = log_p.exp()
            # d logprob / dz = onehot - p;  d entropy / dz = -p (log p + entropy)
            if grad_entropy is not None:
                factor = log_p.add_(entropy[part, None]).mul_(-grad_entropy[part, None])
                if grad_logprobs is not None:
                    factor.sub_(grad_logprobs[part, None])
                grad = probabilities.mul_(factor)
            else:
                assert grad_logprobs is not None
                grad = probabilities.mul_(-grad_logprobs[part, None])
            del log_p, probabilities
            if grad_logprobs is not None:
                grad.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
            grad.div_(temperature)
            if slope is not None:
                grad.mul_(slope)
            typed = grad.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = typed @ weight
            if grad_weight is not None:
                if hidden.dtype == torch.float32:
                    grad_weight.addmm_(typed.T, hidden[part])
                else:
                    grad_weight += typed.T @ hidden[part]
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )
