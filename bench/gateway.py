"""What the gateway takes beside the generate call itself, and how many streams it carries.

    python bench/gateway.py [--turns 200] [--streams 200]

Turns: the same greedy request, one after the other, as a bare call of the platform (samples put, called, decoded) and
through HTTP, in turn; both in one process with the replica in another. Streams: all at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import uvicorn

sys.path.insert(0, str(Path(__file__).parents[1]))

from orchestrator.api.auth import Tokens
from orchestrator.api.gateway.app import Served, create
from orchestrator.api.gateway.gateway import Sampling, Stream
from orchestrator.api.gateway.start import Options, opened

EXAMPLE = Path(__file__).parents[1] / "examples" / "arithmetic"
TOKEN = "a-token-of-the-benchmark"


def body(question: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}], "max_tokens": 24, "temperature": 0, **more}


async def direct(served: Served, prompt: list[int]) -> float:
    """One call with nothing of the gateway but the call."""
    stream = Stream(prompt, Sampling(24, 0.0), 0, 0)
    begun_s = time.perf_counter()
    await served.gateway._call([stream])
    return time.perf_counter() - begun_s


async def through(client: httpx.AsyncClient, question: str) -> float:
    begun_s = time.perf_counter()
    answer = await client.post("/v1/chat/completions", json=body(question))
    assert answer.status_code == 200, answer.text
    return time.perf_counter() - begun_s


async def listened(client: httpx.AsyncClient, question: str) -> tuple[float, str]:
    """Seconds to the first piece of text, and the text."""
    begun_s, first_s, text = time.perf_counter(), 0.0, ""
    async with client.stream("POST", "/v1/chat/completions", json=body(question, stream=True)) as lines:
        async for line in lines.aiter_lines():
            if line.startswith("data: {"):
                piece = json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                first_s = first_s or (time.perf_counter() - begun_s if piece else 0.0)
                text += piece
    return first_s, text


async def measure(turns: int, streams: int) -> dict[str, float]:
    rows = [json.loads(line) for line in (EXAMPLE / "validation.jsonl").read_text().splitlines()]
    questions = [row["prompt"][0]["content"] for row in rows][:streams]
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "tokens"
        file.write_text(f"bench write {TOKEN}\n")
        async with opened(Options(str(EXAMPLE / "model"), replicas=2)) as served:
            config = uvicorn.Config(create(served, Tokens(file), loopback=True), port=0, log_config=None,
                                    access_log=False)  # fmt: skip
            server = uvicorn.Server(config)
            task = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.01)
            url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
            async with httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=600,
                                         limits=httpx.Limits(max_connections=None)) as client:  # fmt: skip
                prompt = served.chat.encode([{"role": "user", "content": questions[0]}])
                alone = [await listened(client, question) for question in questions]  # also warms
                times: dict[str, list[float]] = {"direct": [], "through": []}
                for _ in range(turns):
                    times["direct"].append(await direct(served, prompt))
                    times["through"].append(await through(client, questions[0]))
                begun_s = time.perf_counter()
                together = await asyncio.gather(*(listened(client, question) for question in questions))
                all_s = time.perf_counter() - begun_s
            server.should_exit = True
            await task
    wrong = sum(a[1] != b[1] for a, b in zip(alone, together, strict=True))
    medians = {name: 1000 * statistics.median(values) for name, values in times.items()}
    differences = [b - a for a, b in zip(times["direct"], times["through"], strict=True)]
    return {
        "direct_ms": medians["direct"], "through_ms": medians["through"],
        "overhead_ms": 1000 * statistics.median(differences), "streams": len(questions), "wrong": wrong,
        "streams_s": all_s, "first_text_s": statistics.median(first for first, _ in together),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--streams", type=int, default=200)
    given = parser.parse_args()
    found = asyncio.run(measure(given.turns, given.streams))
    print("| | |\n|---|---|")
    for name, value in found.items():
        print(f"| {name} | {value:.4g} |")
    print(json.dumps({name: round(value, 4) for name, value in found.items()}))


if __name__ == "__main__":
    main()
