"""A cut tail: seconds to move its keys and values through each exchange, against those to compute them again.

    python bench/moves.py [--model smollm qwen] [--dtype bfloat16] [--samples 4] [--tokens 512] [--rounds 3]

Models: the shapes of SmolLM-135M (30 layers, 3 kv heads of 64) and Qwen2.5-0.5B (24 layers, 2 kv heads of 64) with a
vocabulary of 4096, random weights; the torch engine. `samples` of unlike prompts, of `tokens` tokens each:

    again   one prefill of prompt and response (what a tail that does not move does)
    out     engine -> objects in the exchange, as a cut call does it (functions/generate/moves.py)
    in      objects -> requests, as the call that goes on does it
    place   requests -> the engine's cache
    ratio   again / (out + in + place)

Each round does all of them in turn; figures are medians of wall time. Without a network between: what it would add is
its own time for the MB in the table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from functions.base.samples import Finish
from functions.base.wire import Call, Ref, Version
from functions.call.function import Context
from functions.exchange.base import Exchange
from functions.exchange.open import open_exchange
from functions.generate import moves
from functions.generate.engine.base import Request, Sample, Sampling
from functions.generate.torch.engine import TorchEngine
from tests.exchange.servers import MotoServer, RedisServer

VOCABULARY = 4096
VERSION = Version("policy", 0)
CALL = Call("c", "generate", weights={"policy": VERSION})
SHAPES: dict[str, Callable[[], Any]] = {
    "smollm": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
            num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
        )
    ),
    "qwen": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
            num_attention_heads=14, num_key_value_heads=2, max_position_embeddings=8192, tie_word_embeddings=True,
        )
    ),
}  # fmt: skip
STORES = ("directory", "redis", "moto", "tiered")
COLUMNS = ("again", "out", "in", "place")


@contextmanager
def store_of(name: str, folder: Path) -> Iterator[Exchange]:
    servers: list[RedisServer | MotoServer] = []
    url = str(folder / "exchange")
    if name in ("redis", "tiered"):
        servers.append(redis := RedisServer(folder))
        redis.start()
        url = redis.url
    try:
        if name in ("moto", "tiered"):
            servers.append(moto := MotoServer(folder))
            moto.start()
            os.environ.update(moto.environment)
            moto.make_bucket("bench")
            place = f"bench/exchange?endpoint={moto.endpoint}"
            url = f"s3://{place}" if name == "moto" else f"tiered+s3://{place}&redis={url}"
        yield open_exchange(url, "bench")
    finally:
        for server in servers:
            server.stop()


def begun(samples: int, tokens: int) -> list[Request]:
    """Samples that are to be gone on with: half of their tokens are the prompt's."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(samples):
        text = rng.integers(3, VOCABULARY, tokens).astype(np.int32)
        prompt, response = text[: tokens // 2], text[tokens // 2 :]
        found.append(Request(number, number, 0, prompt, response, np.zeros(len(response), np.float32)))
    return found


def cut_at_once() -> Callable[[], bool]:
    looks = iter(range(10**9))
    return lambda: next(looks) >= 1


def a_round(engine: TorchEngine, requests: Sequence[Request], exchange: Exchange, scratch: str) -> dict[str, float]:
    sampling = Sampling(len(requests[0].response) + 8, ignore_eos=True)
    context = Context(exchange, scratch)
    outbox, begun_s = moves.Outbox(CALL, context, [(r.group, r.index) for r in requests]), time.perf_counter()
    cut: list[Sample] = [outbox.add(sample) for sample in engine.generate(requests, sampling, cut_at_once())]
    outbox.close()
    taken = {"again": engine.stats.prefill_s, "out": time.perf_counter() - begun_s - engine.stats.prefill_s}
    refs: list[Ref] = [ref for sample in cut for ref in outbox.refs(sample.number)]
    assert outbox.missing(engine, cut) is None
    assert all(sample.finish == Finish.UNFINISHED for sample in cut)

    more = [replace(requests[sample.number], response=sample.response, logprobs=sample.logprobs) for sample in cut]
    inbox = moves.read(replace(CALL, inputs={"caches": refs}), context, engine, more)
    taken["in"] = inbox.read_s
    assert inbox.missing is None
    rest = list(engine.generate(inbox.hand_over(), sampling, cut_at_once()))
    assert len(rest) == len(requests)
    assert engine.stats.prefill_tokens == 0
    taken["place"] = engine.stats.moved_s
    taken["mb"] = sum(ref.size_bytes for ref in refs) / 1e6
    exchange.delete("caches/")
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--store", nargs="+", choices=STORES, default=list(STORES))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    print(f"{'model':8} {'store':10} {'MB':>6} " + " ".join(f"{c + ' s':>8}" for c in COLUMNS) + f" {'ratio':>6}")
    for model in options.model:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            torch.manual_seed(0)
            SHAPES[model]().to(getattr(torch, options.dtype)).save_pretrained(folder / "model")
            engine = TorchEngine(
                dtype=getattr(torch, options.dtype), device=torch.device("cpu"), slots=64, deterministic=False
            )
            engine.load(VERSION, folder / "model")
            requests = begun(options.samples, options.tokens)
            for store in options.store:
                (folder / store).mkdir()
                with store_of(store, folder / store) as exchange:
                    rounds = [a_round(engine, requests, exchange, name) for _ in range(options.rounds)]
                row = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
                row["ratio"] = row["again"] / (row["out"] + row["in"] + row["place"])
                figures[f"{model} {store}"] = {key: round(value, 4) for key, value in row.items()}
                seconds = " ".join(f"{row[c]:8.3f}" for c in COLUMNS)
                print(f"{model:8} {store:10} {row['mb']:6.0f} {seconds} {row['ratio']:6.1f}", flush=True)
    settings = {"dtype": options.dtype, "samples": options.samples, "tokens": options.tokens}
    print(json.dumps({"bench": "moves", **settings, "figures": figures}))


if __name__ == "__main__":
    main()
