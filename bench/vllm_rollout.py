"""The vLLM engine against bare vLLM, new versions in place, and log-probabilities against transformers.

    python bench/vllm_rollout.py [--rounds 3] [--dtype float32]

Model: Qwen2 architecture, 4 layers of 256, vocabulary 1024, random weights; 64 prompts of 64 tokens x 8 samples x 128
tokens, the same settings on both sides (256 samples at once, 512 MB of KV, fp32, eager, sampled tokens' processed
log-probabilities). `bare` is vllm.LLM.generate with n = 8 and no seeds: with them, it fails on a CPU as soon as a
prompt is prefilled in two parts, which these are. One process each, in turn, `rounds`
times; tokens per second of process CPU time (medians), which other work on the machine disturbs less than wall time.

    update    from a published version's bytes in a directory exchange to the first token that it samples
              (materialize: check and write the files; apply: in place, prefix cache emptied; token: prefill of 64)
    logprobs  |vLLM - transformers| of 64 x 128 sampled tokens, both in the dtype named
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
PROMPTS, SAMPLES, LENGTH = 64, 8, 128
KV_MB, SLOTS = 512, 256


def make_model(directory: Path, seed: int) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from functions.models.pretrained import save_model

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=1024, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    save_model(Qwen2ForCausalLM(config), directory)


def prompts() -> list[list[int]]:
    return np.random.default_rng(7).integers(3, 1024, (PROMPTS, 64)).tolist()  # type: ignore[no-any-return]


def requests(samples: int = SAMPLES) -> list[Any]:
    from functions.generate.engine.base import Request

    nothing = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return [
        Request(group * samples + index, group, index, np.array(prompt, np.int32), *nothing)
        for group, prompt in enumerate(prompts())
        for index in range(samples)
    ]


def ours(model: Path, dtype: str) -> dict[str, Any]:
    from functions.base.wire import Version
    from functions.generate.engine.base import Sampling
    from functions.generate.vllm.engine import VllmEngine
    from functions.generate.vllm.start import VllmSettings

    engine = VllmEngine(VllmSettings(dtype=dtype, slots=SLOTS, kv_cache_mb=KV_MB))
    engine.load(Version("policy", 0), model)
    list(engine.generate(requests(), Sampling(4, ignore_eos=True), lambda: False))
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    found = list(engine.generate(requests(), Sampling(LENGTH, ignore_eos=True), lambda: False))
    tokens = sum(len(sample.response) for sample in found)
    return {"tokens": tokens, "cpu_s": time.process_time() - cpu_s, "wall_s": time.perf_counter() - wall_s}


def bare(model: Path, dtype: str) -> dict[str, Any]:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    llm = LLM(
        str(model), skip_tokenizer_init=True, dtype=dtype, enforce_eager=True, max_num_seqs=SLOTS, seed=0,
        kv_cache_memory_bytes=KV_MB << 20, logprobs_mode="processed_logprobs", distributed_executor_backend="uni",
    )  # fmt: skip

    def generate(length: int) -> int:
        params = [
            SamplingParams(
                n=SAMPLES, temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False,
                logprobs=0, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for _ in range(PROMPTS)
        ]  # fmt: skip
        outputs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts()], params, use_tqdm=False)
        return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)

    generate(4)
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    tokens = generate(LENGTH)
    return {"tokens": tokens, "cpu_s": time.process_time() - cpu_s, "wall_s": time.perf_counter() - wall_s}


def update(model: Path, dtype: str) -> dict[str, Any]:
    import shutil

    from functions.exchange.directory import DirectoryExchange
    from functions.generate.engine.base import Sampling
    from functions.generate.vllm.engine import VllmEngine
    from functions.generate.vllm.start import VllmSettings
    from functions.weights.base import import_model
    from functions.weights.materialize import materialize

    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        exchange = DirectoryExchange(root / "exchange")
        versions = []
        for seed in range(2):
            make_model(root / f"model{seed}", seed)
            versions.append(import_model(exchange, f"policy{seed}", root / f"model{seed}"))
        engine = VllmEngine(VllmSettings(dtype=dtype, slots=SLOTS))
        runs: list[dict[str, float]] = []
        for turn in range(22):
            cpu_s, at = time.process_time(), [time.perf_counter()]
            directory = materialize(exchange, versions[turn % 2], root / "version")
            at.append(time.perf_counter())
            engine.load(versions[turn % 2], directory)
            at.append(time.perf_counter())
            list(engine.generate(requests(1)[:1], Sampling(1), lambda: False))
            at.append(time.perf_counter())
            parts = dict(zip(("materialize", "apply", "token"), np.diff(at).tolist(), strict=True))
            runs.append(parts | {"whole": at[-1] - at[0], "cpu": time.process_time() - cpu_s})
            shutil.rmtree(directory)
        return {name: 1e3 * statistics.median(run[name] for run in runs[2:]) for name in runs[0]}


def logprobs(model: Path, dtype: str) -> dict[str, Any]:
    import torch

    from functions.base.wire import Version
    from functions.generate.engine.base import Sampling
    from functions.generate.vllm.engine import VllmEngine
    from functions.generate.vllm.start import VllmSettings
    from functions.models.pretrained import DTYPES, load_causal_lm

    engine = VllmEngine(VllmSettings(dtype=dtype, slots=SLOTS))
    engine.load(Version("policy", 0), model)
    reference = load_causal_lm(model, dtype=DTYPES[dtype])
    result: dict[str, Any] = {}
    for temperature in (1.0, 0.7):
        wanted = requests(1)
        sampling = Sampling(LENGTH, temperature=temperature, ignore_eos=True)
        found = {sample.number: sample for sample in engine.generate(wanted, sampling, lambda: False)}
        differences = []
        for request in wanted:
            sample = found[request.number]
            tokens = torch.tensor(np.concatenate((request.prompt, sample.response))).long()
            with torch.inference_mode():
                logits = reference(tokens[None]).logits[0, len(request.prompt) - 1 : -1].float() / temperature
            expected = logits.log_softmax(-1).gather(1, tokens[len(request.prompt) :, None])[:, 0].numpy()
            differences.append(np.abs(sample.logprobs - expected))
        flat = np.concatenate(differences)
        points = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
        result[f"T={temperature}"] = {name: float(np.percentile(flat, p)) for name, p in points.items()}
    return result


def child(what: str, model: Path, dtype: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", what, "--model", str(model), "--dtype", dtype]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--child", choices=("ours", "bare", "update", "logprobs"))
    parser.add_argument("--model", type=Path)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(globals()[given.child](given.model, given.dtype)))
        return
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        make_model(model, 0)
        runs: dict[str, list[dict[str, Any]]] = {"bare": [], "ours": []}
        for _ in range(given.rounds):
            for name, found in runs.items():
                found.append(child(name, model, given.dtype))
        rates = {n: [r["tokens"] / r["cpu_s"] for r in found] for n, found in runs.items()}
        median = {name: statistics.median(found) for name, found in rates.items()}
        print(f"{'':8s}{'tok/cpu-s':>12s}   rounds")
        for name, found in rates.items():
            print(f"{name:8s}{median[name]:12.0f}   {'  '.join(f'{rate:.0f}' for rate in found)}")
        ratio = median["ours"] / median["bare"]
        print(f"ours / bare = {ratio:.3f}")
        parts = child("update", model, given.dtype)
        print("update, ms: " + "  ".join(f"{name} {value:.1f}" for name, value in parts.items()))
        differences = {dtype: child("logprobs", model, dtype) for dtype in ("float32", "bfloat16")}
        for dtype, found_by in differences.items():
            for temperature, quantiles in found_by.items():
                print(f"logprobs {dtype:9s} {temperature}  " + "  ".join(f"{k} {v:.2g}" for k, v in quantiles.items()))
    result = {"rates": rates, "ratio": ratio, "update_ms": parts, "logprobs": differences}
    print(json.dumps({"bench": "vllm_rollout", "dtype": given.dtype, "load": os.getloadavg()[0], **result}))


if __name__ == "__main__":
    main()
