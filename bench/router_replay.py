"""What routing replay does for the mismatch of rollout and training: a random Qwen3-MoE, bfloat16 on both sides.

python bench/router_replay.py [--hidden 256] [--layers 8] [--experts 32] [--topk 4] [--length 64]

The rollout is the transformers engine's, training's pass that of packs under autocast, from the same weights. Of the
sampled tokens: the mean and the greatest |difference of log-probabilities|, KL (k3), those whose ratio is beyond 2 or
1/2, and the (token, layer) pairs for which other experts were chosen than in the rollout. `prompts`: the engine's
choices for prompts as well, which a job does not carry.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, Qwen3MoeForCausalLM

from functions.base.samples import Finish, Ragged, SampleBatch
from functions.base.wire import Json, Version
from functions.generate.engine.base import Request, Sampling
from functions.generate.torch.transformers_engine import TransformersEngine
from functions.models.forward import output_head, pack_logprobs
from functions.models.packing import Pack, make_packs
from functions.models.pretrained import load_causal_lm
from functions.models.router_replay import routers

PROMPTS, SAMPLES, PROMPT_TOKENS = 8, 4, 24


def make_model(directory: Path, options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=1000, hidden_size=options.hidden, num_hidden_layers=options.layers,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32, num_experts=options.experts,
        num_experts_per_tok=options.topk, moe_intermediate_size=options.hidden // 2, norm_topk_prob=True,
        max_position_embeddings=512,
    )  # fmt: skip
    model: Any = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(options.scale)
    model.to(torch.bfloat16).save_pretrained(directory)


def rollout(directory: Path, length: int) -> tuple[SampleBatch, list[np.ndarray[Any, Any]]]:
    """Samples with their experts, and those of each prompt [tokens, layers, k]."""
    engine = TransformersEngine(dtype=torch.bfloat16, device=torch.device("cpu"), slots=64, deterministic=False)
    engine.load(Version("policy", 0), directory)
    prompts = np.random.default_rng(0).integers(3, 1000, (PROMPTS, PROMPT_TOKENS)).astype(np.int32)
    none = np.zeros(0, np.int32), np.zeros(0, np.float32)
    requests = [Request(SAMPLES * g + i, g, i, prompts[g], *none) for g in range(PROMPTS) for i in range(SAMPLES)]
    sampling = Sampling(length, routed_experts=True, ignore_eos=True)
    samples = sorted(engine.generate(requests, sampling, lambda: False), key=lambda sample: sample.number)
    base = SampleBatch.of_prompts(prompts.tolist(), samples_per_prompt=SAMPLES, version=0)
    count = len(samples)
    batch = replace(
        base,
        responses=Ragged(np.concatenate([s.response for s in samples]), np.full(count, length, np.int32)),
        logprobs=np.concatenate([s.logprobs for s in samples]), mask=np.ones(count * length, np.float32),
        finish=np.full(count, Finish.LENGTH, np.int32), experts=np.concatenate([s.experts for s in samples]),
    )  # fmt: skip
    model, chosen = load_causal_lm(directory, dtype=torch.bfloat16), dict[int, np.ndarray[Any, Any]]()
    for number, (_, router) in routers(model).items():
        router.register_forward_hook(lambda _, __, out, number=number: chosen.__setitem__(number, out[2].numpy()))
    with torch.no_grad():
        model(torch.from_numpy(prompts.astype(np.int64)))
    whole = np.stack([chosen[n] for n in sorted(chosen)], 1).reshape(PROMPTS, PROMPT_TOKENS, len(chosen), -1)
    return batch, list(whole)


def with_prompts(pack: Pack, batch: SampleBatch, prompts: Sequence[np.ndarray[Any, Any]]) -> Pack:
    assert pack.experts is not None
    assert pack.prefixes is not None
    experts, groups = pack.experts.clone(), iter(dict.fromkeys(int(batch.prompt[row]) for row in pack.rows))
    for prefix in pack.prefixes:
        own = torch.from_numpy(prompts[next(groups)].astype(np.int16))
        experts[0, prefix.start : prefix.start + prefix.length - 1] = own[:-1]
    return replace(pack, experts=experts)


def measured(directory: Path, batch: SampleBatch, prompts: Sequence[np.ndarray[Any, Any]], mode: str) -> Json:
    model, found = load_causal_lm(directory), torch.zeros(len(batch.logprobs))
    assert batch.experts is not None
    head, chosen = output_head(model), torch.zeros(batch.experts.shape, dtype=torch.int64)
    current: list[Pack] = []

    def keep(number: int) -> Any:
        def hook(_: Any, __: Any, out: Any) -> None:
            chosen[current[0].flat, number] = out[2][current[0].predicts]

        return hook

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for pack in make_packs(batch, range(len(batch)), budget_tokens=1024, shared=True, replay=mode != "none"):
            current[:] = [with_prompts(pack, batch, prompts) if mode == "responses and prompts" else pack]
            first = pack_logprobs(model, head, current[0], 1.0)  # registers the replay before the hooks that look
            hooks = [router.register_forward_hook(keep(n)) for n, (_, router) in routers(model).items()]
            assert torch.equal(pack_logprobs(model, head, current[0], 1.0)[0], first[0])
            for hook in hooks:
                hook.remove()
            found[pack.flat] = first[0]
    difference = found.double() - torch.from_numpy(batch.logprobs).double()
    other = (chosen.sort(-1).values != torch.from_numpy(batch.experts.astype(np.int64)).sort(-1).values).any(-1)
    return {
        "replay": mode, "mean": float(difference.abs().mean()), "max": float(difference.abs().max()),
        "kl": float((difference.exp() - 1 - difference).mean()),
        "beyond_2": float((difference.abs() > np.log(2)).double().mean()),
        "other_experts": float(other.double().mean()),
    }  # fmt: skip


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("hidden", 256), ("layers", 8), ("experts", 32), ("topk", 4), ("length", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--scale", type=float, default=5.0, help="of the random weights: 1 is nearly uniform")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name), options)
        batch, prompts = rollout(Path(name), options.length)
        rows = [measured(Path(name), batch, prompts, mode) for mode in ("none", "responses", "responses and prompts")]
    print(f"{'replay':<22} {'mean':>9} {'max':>9} {'KL':>9} {'beyond 2':>9} {'other experts':>14}")
    for row in rows:
        print(f"{row['replay']:<22} {row['mean']:>9.2e} {row['max']:>9.2e} {row['kl']:>9.2e} {row['beyond_2']:>9.2%} "
              f"{row['other_experts']:>14.2%}")  # fmt: skip
    assert batch.experts is not None
    token_bytes = batch.experts[0].nbytes
    print(json.dumps({"bench": "router_replay", "tokens": len(batch.logprobs), "bytes_a_token": token_bytes,
                      "entropy": float(-batch.logprobs.mean()), "rows": rows}))  # fmt: skip


if __name__ == "__main__":
    main()
