"""Tokens per second of process CPU time of the rollout engines, on the same requests with the same response lengths.

    python bench/rollout.py [--vllm-python PATH] [--rounds 3] [--slots 64 128 512] [--workloads ragged equal]

Model: Qwen2 architecture, 4 layers of 256, vocabulary 1024, random weights. Workloads, 64 prompts x 8 samples:
    equal    prompts of 64 tokens, responses of 128
    ragged   prompts of 16-96 tokens, responses lognormal (sigma 0.86, median 48), at most 128
A sample's length is forced (every engine ignores end-of-sequence and is given the sample's own limit), so that all
do the same work. Every engine runs in a process of its own with one thread, in turn, `rounds` times; the table has the
median. Each process generates once to warm up before it is measured.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
PROMPTS, SAMPLES, MOST = 64, 8, 128


@dataclass(frozen=True)
class Workload:
    prompts: list[list[int]]
    lengths: np.ndarray[Any, np.dtype[np.int64]]
    """[prompts, samples]"""

    @classmethod
    def named(cls, name: str) -> Workload:
        rng = np.random.default_rng(7)
        shape = (PROMPTS, SAMPLES)
        if name == "equal":
            prompt_lengths, lengths = np.full(PROMPTS, 64), np.full(shape, MOST)
        elif name == "ragged":
            prompt_lengths = rng.integers(16, 97, PROMPTS)
            lengths = np.clip(rng.lognormal(np.log(48), 0.86, shape).round(), 1, MOST).astype(np.int64)
        else:
            raise SystemExit(f"workload {name!r}: wants equal or ragged")
        return cls([rng.integers(3, 1024, length).tolist() for length in prompt_lengths], lengths)


Generate = Callable[[Workload], int]
"""Generates all of it; the response tokens that came."""


def torch_engine(model: Path, dtype: str, slots: int, deterministic: bool) -> Generate:
    import torch

    from functions.base.wire import Version
    from functions.generate.engine.base import Request, Sampling
    from functions.generate.torch.engine import TorchEngine

    class Targeted(TorchEngine):
        """Stops each sample at the length that the workload gives it."""

        lengths: np.ndarray[Any, np.dtype[np.int64]]

        def limits(self, requests: Any, sampling: Sampling) -> Any:
            return np.array([self.lengths[r.group, r.index] for r in requests])

    engine = Targeted(dtype=getattr(torch, dtype), device=torch.device("cpu"), slots=slots, deterministic=deterministic)
    engine.load(Version("policy", 0), model)
    nothing = np.zeros(0, np.int32), np.zeros(0, np.float32)

    def generate(work: Workload) -> int:
        engine.lengths = work.lengths
        requests = [
            Request(group * SAMPLES + index, group, index, np.array(prompt, np.int32), *nothing)
            for group, prompt in enumerate(work.prompts)
            for index in range(SAMPLES)
        ]
        sampling = Sampling(MOST, seed=1, ignore_eos=True)
        return sum(len(sample.response) for sample in engine.generate(requests, sampling, lambda: False))

    return generate


def transformers_generate(model: Path, dtype: str, slots: int, _: bool) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def generate(work: Workload) -> int:
        rows = [(p, n) for prompt, own in enumerate(work.lengths.tolist()) for n in own for p in [work.prompts[prompt]]]
        tokens = 0
        for start in range(0, len(rows), slots):
            batch = rows[start : start + slots]
            longest = max(len(prompt) for prompt, _ in batch)
            ids = torch.zeros(len(batch), longest, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, (prompt, _) in enumerate(batch):
                ids[row, longest - len(prompt) :] = torch.tensor(prompt)
                mask[row, longest - len(prompt) :] = 1
            config = GenerationConfig(
                max_new_tokens=max(n for _, n in batch), do_sample=True, top_k=0, eos_token_id=None, pad_token_id=0
            )
            with torch.inference_mode():
                lm.generate(ids, attention_mask=mask, generation_config=config)
            tokens += sum(n for _, n in batch)  # rows go on until the longest is done; only what was asked for counts
        return tokens

    return generate


def vllm(model: Path, dtype: str, slots: int, _: bool) -> Generate:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        str(model), dtype=dtype, enforce_eager=True, skip_tokenizer_init=True, max_model_len=512,
        max_num_seqs=slots, distributed_executor_backend="uni", disable_log_stats=True,
    )  # fmt: skip

    def generate(work: Workload) -> int:
        prompts, params = [], []
        for prompt, own in zip(work.prompts, work.lengths.tolist(), strict=True):
            for n in own:
                prompts.append(TokensPrompt(prompt_token_ids=prompt))
                params.append(SamplingParams(max_tokens=n, ignore_eos=True, logprobs=0, detokenize=False))
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


ENGINES = {"torch": torch_engine, "transformers": transformers_generate, "vllm": vllm}


@dataclass(frozen=True)
class Entry:
    engine: str
    dtype: str
    slots: int
    deterministic: bool = False

    @property
    def name(self) -> str:
        return f"{self.engine} {self.dtype}{' deterministic' if self.deterministic else ''}, {self.slots} slots"


def one(entry: Entry, workload: str, model: Path) -> None:
    """In a process of its own: measures one engine and prints tokens and CPU seconds."""
    generate = ENGINES[entry.engine](model, entry.dtype, entry.slots, entry.deterministic)
    work = Workload.named(workload)
    generate(Workload(work.prompts[:8], np.minimum(work.lengths[:8], 16)))
    begun_cpu_s, begun_s = time.process_time(), time.perf_counter()
    tokens = generate(work)
    assert tokens == int(work.lengths.sum()), f"{tokens} tokens, wants {work.lengths.sum()}"
    print(json.dumps([tokens, time.process_time() - begun_cpu_s, time.perf_counter() - begun_s]))


def make_model(directory: Path) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1024, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", help="python of an environment with vLLM; without it vLLM is left out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--workloads", nargs="+", default=["ragged", "equal"])
    parser.add_argument("--engines", nargs="+", default=["torch", "transformers", "vllm"])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        engine, dtype, slots, deterministic = json.loads(arguments.one)
        sys.path.insert(0, str(ROOT))
        return one(Entry(engine, dtype, slots, deterministic), arguments.workloads[0], arguments.model)
    entries: list[Entry] = []
    if "torch" in arguments.engines:
        entries += [Entry("torch", dtype, n) for dtype in ("float32", "bfloat16") for n in arguments.slots]
        entries += [Entry("torch", "float32", n, deterministic=True) for n in arguments.slots]
    if "transformers" in arguments.engines:
        entries += [Entry("transformers", "float32", 64)]
    if "vllm" in arguments.engines and arguments.vllm_python:
        entries += [Entry("vllm", dtype, 256) for dtype in ("float32", "bfloat16")]
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory))
        rates = measure(entries, arguments.workloads, arguments.rounds, Path(directory), arguments.vllm_python)
    print(f"{'tokens per CPU-second':44}" + "".join(f"{w:>12}" for w in arguments.workloads))
    for entry in entries:
        cells = [rates[w][entry.name] for w in arguments.workloads]
        print(f"{entry.name:44}" + "".join(f"{cell:12.0f}" for cell in cells))
    print(json.dumps({"tokens_per_cpu_s": rates}))
    return None


def measure(
    entries: list[Entry], workloads: list[str], rounds: int, model: Path, vllm_python: str | None
) -> dict[str, dict[str, float]]:
    """Median tokens per CPU second by workload and entry; entries take turns."""
    found: dict[str, dict[str, list[float]]] = {w: {e.name: [] for e in entries} for w in workloads}
    for _ in range(rounds):
        for workload in workloads:
            for entry in entries:
                python = vllm_python if entry.engine == "vllm" else None
                what = json.dumps([entry.engine, entry.dtype, entry.slots, entry.deterministic])
                command = [python or sys.executable, __file__, "--one", what]
                command += ["--workloads", workload, "--model", str(model)]
                environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise SystemExit(f"{entry.name}, {workload}: {done.stderr[-2000:]}")
                tokens, cpu_s, _ = json.loads(done.stdout.strip().splitlines()[-1])
                found[workload][entry.name].append(tokens / cpu_s)
                print(f"{workload} {entry.name}: {tokens / cpu_s:.0f}", file=sys.stderr)
    return {w: {name: round(statistics.median(r), 1) for name, r in by.items()} for w, by in found.items()}


if __name__ == "__main__":
    main()
