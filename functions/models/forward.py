"""Log-probabilities and values of packed samples: the forward pass that the reference and train functions share."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from functions.algorithms.logprobs import Output, kept_mass, squared_mass, token_logprobs, topk_logprobs, topk_of
from functions.algorithms.penalties import NO_PENALTIES, History, Penalties
from functions.algorithms.truncation import WHOLE, Truncation
from functions.models.packing import Pack
from functions.models.prefix_attention import NAME as PREFIX_SHARED
from functions.models.pretrained import backbone, lm_head, row_attention, score_head
from functions.models.router_replay import replay

SHARED_ARCHITECTURES = frozenset(
    ("gemma3_text", "gpt2", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3")
)
"""model_type of architectures whose positions come from position_ids and whose attention is plain: a prompt's tokens
are computed once for all its samples. tests/train/test_forward.py checks each against padded rows."""


def shares_prefix(config: PreTrainedConfig, longest: int) -> bool:
    """Whether samples of up to `longest` tokens can be packed behind one copy of their prompt.

    Chosen by architecture: SHARED_ARCHITECTURES, and no layer with a sliding window shorter than the longest sequence.
    Everything else is computed in padded rows, as transformers itself would.
    """
    if config.model_type not in SHARED_ARCHITECTURES:
        return False
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    slides = window is not None and (kinds is None or "sliding_attention" in kinds)
    return not slides or longest <= int(window or 0)


@dataclass(frozen=True)
class Head:
    """How states become logits: softcap(states @ weight.T + bias) / scale."""

    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    scale: float


def head_form(model: PreTrainedModel) -> Head:
    """The output head as the model's configuration describes it."""
    layer, config = lm_head(model), model.config
    return Head(
        layer.weight,
        layer.bias,
        getattr(config, "final_logit_softcapping", None),
        float(getattr(config, "logits_scaling", 1.0)) / float(getattr(config, "logit_scale", 1.0)),
    )


def output_head(model: PreTrainedModel) -> Head:
    """`head_form`. ValueError where the model's own logits are not what this form gives (checked on four tokens):
    log-probabilities computed from such states would be wrong without a sign of it."""
    layer, head = lm_head(model), head_form(model)
    tokens = torch.arange(4, device=layer.weight.device)[None] % layer.weight.shape[0]
    with torch.no_grad():
        _use_attention(model, row_attention(model))
        states = backbone(model)(input_ids=tokens, use_cache=False).last_hidden_state
        logits = layer(states)
        if head.softcap is not None:
            logits = head.softcap * torch.tanh(logits / head.softcap)
        own = model(input_ids=tokens, use_cache=False).logits
        if not torch.allclose(logits.float() / head.scale, own.float(), rtol=1e-2, atol=1e-2, equal_nan=True):
            raise ValueError(f"{type(model).__name__}: its logits are not its output layer applied to its last states")
    return head


def all_states(model: PreTrainedModel, pack: Pack, inputs: Tensor | None = None) -> Tensor:
    """[B, T, H]: the states of all of the pack's tokens; from `inputs`, of the same shape, instead of the tokens'
    embeddings, where an earlier stage of a pipeline has them."""
    _use_attention(model, row_attention(model) if pack.prefixes is None else PREFIX_SHARED)
    given: dict[str, Any] = {"input_ids": pack.tokens} if inputs is None else {"inputs_embeds": inputs}
    given |= {} if pack.prefixes is None else {"prefixes": pack.prefixes}
    if pack.experts is not None:
        replay(model)
        given |= {"experts": pack.experts}
    output = backbone(model)(position_ids=pack.positions, use_cache=False, **given)
    hidden: Tensor = output.last_hidden_state
    return hidden


def states(model: PreTrainedModel, pack: Pack, inputs: Tensor | None = None) -> Tensor:
    """[N, H]: the states (final norm included) that predict the pack's response tokens."""
    hidden = all_states(model, pack, inputs)
    return hidden.reshape(-1, hidden.shape[-1]).index_select(0, pack.predicts)


def pack_logprobs(
    model: PreTrainedModel,
    head: Head,
    pack: Pack,
    temperature: float,
    truncation: Truncation = WHOLE,
    *,
    penalties: Penalties = NO_PENALTIES,
    history: History | None = None,
    squares: bool = False,
    topk_ids: Tensor | None = None,
    inputs: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """(log-probability, entropy, ln of the mass that `truncation` keeps) of the pack's response tokens: float32 [N],
    at `temperature`, the first two differentiable; in the mass is what `penalties` change (kept_mass). Then, where
    `squares`, sum_v p(v)^2 [N]; where `topk_ids` int64 [N, K], the log-probabilities of these [N, K], differentiable.
    """
    if head.softcap is not None and head.scale != 1.0:
        raise ValueError("a head with both a soft cap and a scale of its logits is not known here")
    hidden, output, targets = states(model, pack, inputs), _output(head, temperature), pack.targets
    found: list[Tensor] = [*token_logprobs(hidden=hidden, output=output, targets=targets)]
    found.append(kept_mass(hidden=hidden.detach(), output=output, truncation=truncation, targets=targets,
                           penalties=penalties, history=history))  # fmt: skip
    if squares:
        found.append(squared_mass(hidden=hidden.detach(), output=output))
    if topk_ids is not None:
        found.append(topk_logprobs(hidden=hidden, output=output, ids=topk_ids))
    return tuple(found)


def pack_topk(
    model: PreTrainedModel, head: Head, pack: Pack, temperature: float, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probability of each response token [N], those of its `count` most probable tokens [N, K], their ids)."""
    hidden, output = states(model, pack), _output(head, temperature)
    logprobs, _ = token_logprobs(hidden=hidden, output=output, targets=pack.targets)
    return logprobs, *topk_of(hidden=hidden, output=output, count=count)


def _output(head: Head, temperature: float) -> Output:
    return Output(weight=head.weight, bias=head.bias, softcap=head.softcap, temperature=temperature * head.scale)


def pack_values(model: PreTrainedModel, pack: Pack, inputs: Tensor | None = None) -> Tensor:
    """[N] float32: the critic's value before each response token."""
    values: Tensor = score_head(model)(states(model, pack, inputs))
    return values[:, 0].float()


def _use_attention(model: PreTrainedModel, name: str) -> None:
    if model.config._attn_implementation != name:
        model.set_attn_implementation(name)
