"""What the node agent runs once, so that replicas forked from it find all of it loaded: lazy imports, operators,
kernels. In one thread, and without touching a GPU."""

import asyncio
import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from functions.base.samples import Columns, SampleBatch
from functions.base.wire import Call, Event, Json
from functions.call.function import Context, FatalError
from functions.exchange.directory import DirectoryExchange
from functions.server.app import Open, Server
from functions.server.kinds import build, load
from functions.server.settings import Settings, listen_unix
from functions.weights.base import import_model


def preload(kinds: Sequence[str], scratch: str | None) -> None:
    """Loads what replicas of these kinds need. A kind that cannot be loaded is left to its replicas, who say why."""
    warm_server(scratch)
    for kind in kinds:
        with suppress(FatalError):
            load(kind)
    if {"generate", "reference", "train"} & set(kinds):
        from functions.exchange import s3

        s3.preload()
        warm_functions(kinds, scratch)


def warm_server(scratch: str | None) -> None:
    """A server and its caller in one thread: one call over a real socket, answered without a function."""

    def answer(opened: Open | None) -> None:
        if opened is not None:
            opened.attempt.send(Event("done").to_line())
            asyncio.get_running_loop().call_soon(server.ended, opened, "done")

    server = Server(Settings("warm", "", "warm", "warm"), answer, lambda: None)
    shell = server.shell()

    async def both(path: Path) -> None:
        serving = asyncio.create_task(shell.serve(sockets=[listen_unix(str(path))]))
        reader, writer = await asyncio.open_unix_connection(str(path))
        body = json.dumps(Call("warm", "warm").to_json()).encode()
        head = f"POST /v1/call HTTP/1.1\r\nhost: replica\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        lines = (await reader.read()).splitlines()
        writer.close()
        shell.should_exit = True
        await serving
        assert b"200 OK" in lines[0], lines

    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        asyncio.run(both(Path(directory) / "s"))


def warm_functions(kinds: Sequence[str], scratch: str | None) -> None:
    """One small call of each of the project's functions that works with torch, over a tiny random Llama."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from functions.models.pretrained import save_model

    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        save_model(LlamaForCausalLM(config), Path(directory) / "model")
        exchange = DirectoryExchange(f"{directory}/exchange")
        weights = {"policy": import_model(exchange, "warm", Path(directory) / "model")}
        weights["model"] = weights["policy"]
        batch = SampleBatch.of_prompts([[3, 4], [5, 6, 7]], samples_per_prompt=2, version=0)
        inputs = {"samples": [exchange.put("in/samples", batch.encode())]}

        def run(kind: str, operation: str, params: Json) -> list[Event]:
            options = {"device": "cpu"} | ({"engine": "torch"} if kind == "generate" else {})
            call = Call(f"{operation}", operation, inputs, weights, params)
            return list(build(kind, options).call(call, Context(exchange, directory)))

        sampled = run("generate", "generate", {"max_response_length": 3})
        inputs["samples"] = [event.ref for event in sampled if event.kind == "samples" and event.ref is not None]
        if "reference" in kinds:
            run("reference", "logprobs", {})
        if "train" in kinds and torch.version.cuda is None:  # with CUDA, a backward pass starts a thread per device
            scores = np.arange(4, dtype=np.float32)
            finished = SampleBatch.concat([SampleBatch.decode(exchange.get(ref)) for ref in inputs["samples"]])
            inputs["columns"] = [exchange.put("in/scores", Columns.of(finished, sample={"score": scores}).encode())]
            run("train", "train", {})
