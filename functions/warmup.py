"""Runs torch and transformers once over a tiny random model, so that replicas forked afterwards find all of it loaded:
lazy imports, operator dispatch, allocator, kernels. In one thread, and without touching a GPU."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def warm_torch() -> None:
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    tokens = torch.full((2, 4), 3)
    model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=2, do_sample=True)  # type: ignore[misc]
    logprobs = model(tokens).logits.log_softmax(-1)
    if torch.version.cuda is None:  # with CUDA, a backward pass starts a thread for each device
        torch.nn.functional.nll_loss(logprobs.flatten(0, 1), tokens.flatten()).backward()  # type: ignore[no-untyped-call]
        torch.optim.AdamW(model.parameters()).step()
