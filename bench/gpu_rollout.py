"""The vLLM engine on a GPU: tokens per second, time to the first sample, version update, memory.

    python bench/gpu_rollout.py [--size 0.5b | 1.5b] [--prompts 64] [--samples 8] [--length 512]

Random weights in the shapes of Qwen2.5 0.5B and 1.5B, bfloat16, prompts of 256 tokens. Exits with status 2, and says
so, where there is no GPU or vLLM was not built for one.

    start     from nothing loaded to an engine that holds the weights: import, load, profile, warm-up and graphs
    first     from the call to its first finished sample
    update    another version's directory applied in place, prefix cache emptied (the median of 5)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "tie_word_embeddings": True},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "tie_word_embeddings": True},
}  # fmt: skip
VOCABULARY, PROMPT = 151_936, 256


def make_model(directory: Path, size: str, seed: int) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from functions.models.pretrained import save_model

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY, max_position_embeddings=4096, bos_token_id=None, eos_token_id=0, pad_token_id=1,
        **SHAPES[size],
    )  # fmt: skip
    with torch.device("cuda"):
        model: Any = Qwen2ForCausalLM(config)
    save_model(model.to(torch.bfloat16), directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SHAPES), default="0.5b")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing was measured", file=sys.stderr)
        raise SystemExit(2)
    begun_s = time.perf_counter()
    from functions.generate.vllm.start import VllmSettings, device_type

    if device_type() != "cuda":
        print(f"the installed vLLM was built for {device_type()}: nothing was measured", file=sys.stderr)
        raise SystemExit(2)
    from functions.base.wire import Version
    from functions.generate.engine.base import Request, Sampling
    from functions.generate.vllm.engine import VllmEngine

    import_s = time.perf_counter() - begun_s
    with tempfile.TemporaryDirectory() as temporary:
        models = [Path(temporary) / str(seed) for seed in range(2)]
        for seed, model in enumerate(models):
            make_model(model, given.size, seed)
        torch.cuda.empty_cache()
        begun_s = time.perf_counter()
        engine = VllmEngine(VllmSettings(dtype="bfloat16", slots=512, context=PROMPT + given.length))
        engine.load(Version("policy", 0), models[0])
        start_s = time.perf_counter() - begun_s
        rng, nothing = np.random.default_rng(0), (np.zeros(0, np.int32), np.zeros(0, np.float32))
        prompts = rng.integers(2, VOCABULARY, (given.prompts, PROMPT)).astype(np.int32)
        requests = [
            Request(group * given.samples + index, group, index, prompt, *nothing)
            for group, prompt in enumerate(prompts)
            for index in range(given.samples)
        ]
        sampling = Sampling(given.length, ignore_eos=True)
        list(engine.generate(requests[:8], Sampling(8, ignore_eos=True), lambda: False))
        begun_s, first_s, tokens = time.perf_counter(), 0.0, 0
        for sample in engine.generate(requests, sampling, lambda: False):
            first_s = first_s or time.perf_counter() - begun_s
            tokens += len(sample.response)
        rollout_s = time.perf_counter() - begun_s
        updates = []
        for number in range(1, 6):
            begun_s = time.perf_counter()
            engine.load(Version("policy", number), models[number % 2])
            torch.cuda.synchronize()
            updates.append(time.perf_counter() - begun_s)
        free, total = torch.cuda.mem_get_info()
        result = {
            "device": torch.cuda.get_device_name(), "size": given.size, "samples": len(requests), "tokens": tokens,
            "tokens_per_s": tokens / rollout_s, "import_s": import_s, "start_s": start_s, "first_s": first_s,
            "update_s": statistics.median(updates), "memory_gb": (total - free) / 1e9,
            "load": os.getloadavg()[0],
        }  # fmt: skip
        engine.close()
    for name, value in result.items():
        print(f"{name:14s}{value:>14.3f}" if isinstance(value, float) else f"{name:14s}{value!s:>14s}")
    print(json.dumps({"bench": "gpu_rollout", **result}))


if __name__ == "__main__":
    main()
