"""`rlhf-orchestrate serve-model`, `chat` and `sample`: the gateway as a server, in a terminal, and over a file."""

import asyncio
import json
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from functions.base.http_limits import limited_server
from functions.base.logs import About, log_lines
from orchestrator.api.auth import Tokens, own_token, read_token
from orchestrator.api.gateway.app import create
from orchestrator.api.gateway.start import Options, opened
from orchestrator.api.same_origin import is_loopback
from orchestrator.base.errors import ConfigError, DataError, RunError


def serve(options: Options, *, host: str, port: int, tokens: Path | None) -> None:
    """Until SIGINT or SIGTERM."""
    if tokens is None and not is_loopback(host):
        raise ConfigError(f"--host {host}: is open to others; --tokens FILE says who may use it")
    log_lines(About({"function": "gateway"}))

    async def run(place: Path) -> None:
        async with opened(options) as served:
            file = tokens or own_token(place)
            app = create(served, Tokens(file), loopback=is_loopback(host))
            print(f"model:  {served.name}\nOpenAI: http://{host}:{port}/v1", flush=True)
            if tokens is None:
                print(f"token:  {read_token(file)}", flush=True)
            await limited_server(app, host=host, port=port, timeout_graceful_shutdown=3).serve()

    with tempfile.TemporaryDirectory(prefix="rlhf-serve-") as place:
        asyncio.run(run(Path(place)))


@asynccontextmanager
async def client(options: Options) -> AsyncIterator[httpx.AsyncClient]:
    """Of a gateway in this process."""
    with tempfile.TemporaryDirectory(prefix="rlhf-serve-") as place:
        tokens = Path(place) / "tokens"
        token = secrets.token_urlsafe(32)
        tokens.write_text(f"local write {token}\n")
        async with opened(options) as served:
            app = create(served, Tokens(tokens), loopback=True)
            headers = {"authorization": f"Bearer {token}"}
            async with (
                served.gateway,
                httpx.AsyncClient(
                    transport=httpx.ASGITransport(app), base_url="http://localhost", headers=headers, timeout=None
                ) as made,
            ):
                yield made


def chat(options: Options, settings: Mapping[str, Any]) -> None:
    """Reads lines and answers them, until the end of input."""

    async def run() -> None:
        messages: list[dict[str, str]] = []
        async with client(options) as asked:
            while True:
                try:
                    line = await asyncio.to_thread(input, "> " if sys.stdin.isatty() else "")
                except EOFError:
                    return
                messages.append({"role": "user", "content": line})
                body = {"messages": messages, **settings}
                answer = (await asked.post("/v1/chat/completions", json=body)).json()
                if "error" in answer:
                    raise RunError(answer["error"]["message"])
                said = answer["choices"][0]["message"]["content"] or ""
                print(said, flush=True)
                messages.append({"role": "assistant", "content": said})

    asyncio.run(run())


def sample(options: Options, prompts: Path, out: Path, settings: Mapping[str, Any], *, at_a_time: int = 64) -> int:
    """Answers the rows of a JSONL file (`prompt`: text or messages): the row with `responses`, in the file's order.
    How many. Raises DataError for a row that cannot be asked, before any is."""
    rows = []
    for number, line in enumerate(prompts.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
            prompt = row.get("prompt", row.get("messages"))
        except (ValueError, AttributeError) as error:
            raise DataError(f"{prompts}:{number}: wants a JSON object a line: {error}") from error
        if not isinstance(prompt, str | list) or not prompt:
            raise DataError(f"{prompts}:{number}: wants `prompt`, a text or a list of messages")
        rows.append((row, prompt))

    async def run() -> None:
        free = asyncio.Semaphore(at_a_time)
        async with client(options) as asked:

            async def one(number: int, row: dict[str, Any], prompt: str | list[Any]) -> str:
                chat_form = isinstance(prompt, list)
                path = "/v1/chat/completions" if chat_form else "/v1/completions"
                body = {"messages" if chat_form else "prompt": prompt, "return_token_ids": True, **settings}
                async with free:
                    answer = (await asked.post(path, json=body)).json()
                if "error" in answer:
                    raise RunError(f"{prompts}:{number}: {answer['error']['message']}")
                choices = answer["choices"]
                texts = [c["message"]["content"] if chat_form else c["text"] for c in choices]
                more = {"token_ids": [c["token_ids"] for c in choices], "finish": [c["finish_reason"] for c in choices]}
                return json.dumps({**row, "responses": texts, **more}, ensure_ascii=False) + "\n"

            lines = await asyncio.gather(*(one(i, *row) for i, row in enumerate(rows, start=1)))
            out.write_text("".join(lines))

    asyncio.run(run())
    return len(rows)
