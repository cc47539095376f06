"""vLLM: samples that were cut go on with the keys and values that came with them, or compute them again.

    python bench/vllm_moved.py [--samples 2] [--dtype float32]

Model: Qwen2.5-0.5B's layers, 8 of its 24, random weights. Samples of unlike prompts, of as many tokens as a row says,
are cut and go on until each has a token more. One engine, one thread, process CPU time, medians of `rounds`:

    out      blocks -> KeysValues
    on       KeysValues -> blocks, and the step that computes what is left (fewer tokens than a block has: 32 on a CPU,
             16 on a GPU) and the next token
    again    the steps that compute everything, and the next token
    ratio    again / (out + on)
The exchange lies between and is not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from functions.generate.engine.base import Request, Sample
    from functions.generate.vllm.engine import VllmEngine

PROMPT = 256
TOKENS = (528, 1040, 2064)
"""Half a block of a CPU more than whole ones: what is left to compute on the average."""
COLUMNS = ("out", "on", "again", "ratio")


def make_model(directory: Path) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from functions.models.pretrained import save_model

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1024, hidden_size=896, intermediate_size=4864, num_hidden_layers=8, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=8192, bos_token_id=None, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    save_model(Qwen2ForCausalLM(config), directory)


def requests(tokens: int, samples: int) -> list[Request]:
    from functions.generate.engine.base import Request

    rng, given = np.random.default_rng(tokens), tokens - PROMPT
    drawn = rng.integers(3, 1024, (samples, tokens)).astype(np.int32)
    return [Request(n, n, 0, row[:PROMPT], row[PROMPT:], np.zeros(given, np.float32)) for n, row in enumerate(drawn)]


def begin(engine: VllmEngine, wanted: Sequence[Request]) -> tuple[list[Sample], float, float]:
    """Samples with a token more or a few, CPU seconds until the last of them had it, and of handing them over."""
    from functions.generate.engine.base import Sampling

    engine.forget_prefixes()
    total = sum(len(request.prompt) + len(request.response) for request in wanted)
    longest, cut_s = max(len(request.response) for request in wanted), 0.0

    def stop() -> bool:
        nonlocal cut_s
        cut_s = time.process_time()
        stats = engine.stats
        return stats.prefill_tokens + stats.shared_tokens + stats.moved_tokens == total

    begun_s = time.process_time()
    found = list(engine.generate(wanted, Sampling(longest + 64, ignore_eos=True), stop))
    return found, cut_s - begun_s, time.process_time() - cut_s


def measure(engine: VllmEngine, tokens: int, samples: int) -> dict[str, float]:
    wanted = requests(tokens, samples)
    parts, _, out_s = begin(engine, wanted)
    given = [
        replace(wanted[part.number], response=part.response, logprobs=part.logprobs, cache=part.cache) for part in parts
    ]
    _, on_s, _ = begin(engine, given)
    assert engine.stats.moved_tokens > 0
    _, again_s, _ = begin(engine, [replace(request, cache=None) for request in given])
    return {"out": out_s, "on": on_s, "again": again_s, "ratio": again_s / (out_s + on_s)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from functions.base.wire import Version
    from functions.generate.engine.keys_values import Layout
    from functions.generate.vllm.engine import VllmEngine
    from functions.generate.vllm.start import VllmSettings

    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory))
        engine = VllmEngine(VllmSettings(dtype=given.dtype, slots=given.samples, context=8192, kv_cache_mb=1024))
        engine.load(Version("policy", 0), Path(directory))
    assert isinstance(engine.cache_layout, Layout)
    print(f"{given.samples} samples, {engine.cache_layout}; CPU seconds")
    print(f"{'tokens':>7s}{'MB each':>9s}" + "".join(f"{name:>9s}" for name in COLUMNS))
    rows = {}
    measure(engine, TOKENS[0], given.samples)
    for tokens in TOKENS:
        runs = [measure(engine, tokens, given.samples) for _ in range(given.rounds)]
        rows[tokens] = {name: round(statistics.median(run[name] for run in runs), 4) for name in COLUMNS}
        megabytes = tokens * engine.cache_layout.token_bytes / 1e6
        print(f"{tokens:7d}{megabytes:9.1f}" + "".join(f"{rows[tokens][name]:9.3f}" for name in COLUMNS))
    engine.close()
    print(
        json.dumps(
            {
                "bench": "vllm_moved",
                "load": os.getloadavg()[0],
                "dtype": given.dtype,
                "samples": given.samples,
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
