"""What a system prompt that all prompts share costs: the torch engine, with and without computing it once a call.

python bench/system_prompt.py [--head 384] [--prompts 32] [--samples 4] [--tokens 16] [--repeats 5]

A random Qwen2 (4 layers, hidden 256, 3.2 M parameters), prompts of 16 tokens behind a common head, one thread; process
CPU time, medians of repeats that take turns. `off` is the same engine told that no head is worth sharing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from functions.base.wire import Version
from functions.generate.engine.base import Request, Sampling
from functions.generate.torch import prefill
from functions.generate.torch.engine import TorchEngine


def make_model(directory: Path, context: int) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1024, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=context, eos_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(directory)


def requests(prompts: int, samples: int, head: int) -> list[Request]:
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 1000, head)
    nothing = np.zeros(0, np.int32), np.zeros(0, np.float32)
    own = [np.concatenate((shared, rng.integers(3, 1000, 16))).astype(np.int32) for _ in range(prompts)]
    return [Request(g * samples + i, g, i, own[g], *nothing) for g in range(prompts) for i in range(samples)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("head", 384), ("prompts", 32), ("samples", 4), ("tokens", 16), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(1)
    engine = TorchEngine(dtype=torch.float32, device=torch.device("cpu"), slots=128, deterministic=False)
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory), given.head + 16 + given.tokens)
        engine.load(Version("policy", 0), Path(directory))
    asked = requests(given.prompts, given.samples, given.head)
    sampling = Sampling(given.tokens, seed=1, ignore_eos=True)
    worth = {"off": 1 << 30, "once": prefill.WORTH_SHARING}
    cpu_s: dict[str, list[float]] = {name: [] for name in worth}
    prefill_s: dict[str, list[float]] = {name: [] for name in worth}
    tokens: dict[str, int] = {}
    for repeat in range(given.repeats + 1):
        for name, least in worth.items():
            prefill.WORTH_SHARING = least
            begin_s = time.process_time()
            for _ in engine.generate(asked, sampling, lambda: False):
                pass
            if repeat:  # the first warms up
                cpu_s[name].append(time.process_time() - begin_s)
                prefill_s[name].append(engine.stats.prefill_s)
            tokens[name] = engine.stats.prefill_tokens
    print(f"{'head':<6} {'prefill tokens':>14} {'prefill s':>10} {'CPU s':>8}")
    for name in worth:
        print(f"{name:<6} {tokens[name]:>14} {statistics.median(prefill_s[name]):>10.3f} "
              f"{statistics.median(cpu_s[name]):>8.3f}")  # fmt: skip
    result = {
        name: {"prefill_tokens": tokens[name], "cpu_s": round(statistics.median(cpu_s[name]), 4)} for name in worth
    }
    print(json.dumps({"bench": "system_prompt", **vars(given), **result}))


if __name__ == "__main__":
    main()
