"""What the vLLM engine costs to start, part by part, on a CPU.

    python bench/vllm_cold_start.py [--repeats 5] [--async]

    import    vllm and all that a start needs (preload); paid once by the node agent
    start     the engine: configuration, worker, model class, weights, KV cache (no profiling, no warm-up on a CPU)
    token     prefill of 37 tokens and the first sampled token

    fresh     a new process: all three
    forked    from a parent that has preloaded, collected and frozen its heap: the last two
    --async   vLLM's AsyncLLM instead, engine core and worker in processes of their own, in a new process

Tiny Qwen2 model (4 layers of 256), context 512. Medians of wall seconds, and of CPU seconds of the process, which other
work on the machine disturbs less (--async: its children's CPU is not counted).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from bench.vllm_rollout import ROOT, make_model, requests

Laps = dict[str, float]


class Clock:
    def __init__(self) -> None:
        self.laps: Laps = {}
        self._at = time.perf_counter(), time.process_time()

    def lap(self, name: str) -> None:
        now = time.perf_counter(), time.process_time()
        self.laps |= {f"{name}_s": now[0] - self._at[0], f"{name}_cpu_s": now[1] - self._at[1]}
        self._at = now


def start(model: Path, clock: Clock) -> None:
    from functions.base.wire import Version
    from functions.generate.engine.base import Sampling
    from functions.generate.vllm.engine import VllmEngine
    from functions.generate.vllm.start import VllmSettings

    engine = VllmEngine(VllmSettings(slots=64))
    engine.load(Version("policy", 0), model)
    clock.lap("start")
    list(engine.generate(requests(1)[:1], Sampling(1), lambda: False))
    clock.lap("token")


def fresh(model: Path) -> list[Laps]:
    clock = Clock()
    from functions.generate.vllm.start import preload

    preload()
    clock.lap("import")
    start(model, clock)
    return [clock.laps]


def forked(model: Path, repeats: int) -> list[Laps]:
    from functions.generate.vllm.start import preload

    preload()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a fork is not safe"
    gc.collect()
    gc.freeze()
    laps = []
    for _ in range(repeats):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                clock = Clock()
                start(model, clock)
                rss = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6
                os.write(write, json.dumps(clock.laps | {"rss_mb": rss}).encode())
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(write)
        os.waitpid(pid, 0)
        laps.append(json.loads(os.read(read, 65536)))
        os.close(read)
    return laps


def async_engine(model: Path) -> list[Laps]:
    clock = Clock()
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs import TokensPrompt
    from vllm.v1.engine.async_llm import AsyncLLM

    clock.lap("import")

    async def run() -> None:
        arguments = AsyncEngineArgs(
            str(model), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_num_seqs=64,
            kv_cache_memory_bytes=64 << 20, logprobs_mode="processed_logprobs",
        )  # fmt: skip
        engine = AsyncLLM.from_engine_args(arguments)
        clock.lap("start")
        prompt = TokensPrompt(prompt_token_ids=list(range(3, 40)))
        async for _ in engine.generate(prompt, SamplingParams(max_tokens=1, logprobs=0, detokenize=False), "0"):
            pass
        clock.lap("token")
        engine.shutdown()

    asyncio.run(run())
    return [clock.laps]


def child(what: str, model: Path, repeats: int) -> list[Laps]:
    command = [sys.executable, __file__, "--child", what, "--model", str(model), "--repeats", str(repeats)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--async", action="store_true", dest="with_async")
    parser.add_argument("--child", choices=("fresh", "forked", "async"))
    parser.add_argument("--model", type=Path)
    given = parser.parse_args()
    if given.child:
        laps = {
            "fresh": lambda: fresh(given.model),
            "forked": lambda: forked(given.model, given.repeats),
            "async": lambda: async_engine(given.model),
        }[given.child]()
        print(json.dumps(laps))
        return
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        make_model(model, 0)
        found = {"forked": child("forked", model, given.repeats)}
        rounds = max(1, given.repeats // 2)
        found["fresh"] = [lap for _ in range(rounds) for lap in child("fresh", model, 1)]
        if given.with_async:
            found["async"] = child("async", model, 1)
    result: dict[str, Any] = {}
    print(f"{'wall s (CPU s)':10s}  {'import':>16s}{'start':>16s}{'token':>16s}{'together':>16s}")
    for name, laps in found.items():
        median = {key: statistics.median(lap[key] for lap in laps) for key in laps[0]}
        parts = [part for part in ("import", "start", "token") if f"{part}_s" in median]
        whole = sum(median[f"{p}_s"] for p in parts), sum(median[f"{p}_cpu_s"] for p in parts)
        cells = [f"{median[f'{p}_s']:.2f} ({median[f'{p}_cpu_s']:.2f})" if p in parts else "-"
                 for p in ("import", "start", "token")]  # fmt: skip
        print(f"{name:14s}  " + "".join(f"{cell:>16s}" for cell in [*cells, f"{whole[0]:.2f} ({whole[1]:.2f})"]))
        result[name] = median | {"together_s": whole[0], "together_cpu_s": whole[1]}
    print(json.dumps({"bench": "vllm_cold_start", "load": os.getloadavg()[0], **result}))


if __name__ == "__main__":
    main()
