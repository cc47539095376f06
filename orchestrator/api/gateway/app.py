"""The routes of a served model.

POST /v1/chat/completions     POST /v1/completions     POST /inference/v1/generate     GET /v1/models
GET  /healthz                 everything else wants `Authorization: Bearer TOKEN`

Errors are OpenAI's: {"error": {"message", "type", "param", "code"}}.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

from functions.base.chat import Chat
from functions.base.http_limits import TooLarge, bounded_body
from orchestrator.api.auth import Tokens
from orchestrator.api.gateway import forms
from orchestrator.api.gateway.forms import Asked, Refused
from orchestrator.api.gateway.gateway import Gateway, Stream
from orchestrator.api.gateway.texts import Text
from orchestrator.api.problems import ApiError
from orchestrator.api.same_origin import SameOrigin

Form = Literal["chat", "completion", "tokens"]
LARGEST_BYTES = 32 << 20
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Served:
    name: str
    chat: Chat
    context: int | None
    gateway: Gateway


def create(served: Served, tokens: Tokens, *, loopback: bool) -> FastAPI:
    """`loopback`: the server listens on this machine alone."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with served.gateway:
            yield

    app = FastAPI(title="rlhf-orchestrate model", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.add_middleware(SameOrigin, loopback=loopback)

    def route(path: str, form: Form, parse: Callable[[Mapping[str, Any], Chat, int | None], Asked]) -> None:
        async def answer(request: Request) -> Response:
            try:
                tokens.check(request.headers.get("authorization"), "write")
                body = json.loads(await bounded_body(request, LARGEST_BYTES))
                if not isinstance(body, dict):
                    raise Refused("wants a JSON object")
                if body.get("model") not in (None, "", served.name):
                    return refusal(404, f"model {body['model']!r:.60} is not served here: {served.name}", "model")
                asked = parse(body, served.chat, served.context)
            except ApiError as error:
                return refusal(error.status, error.detail)
            except TooLarge:
                return refusal(413, f"a request has at most {LARGEST_BYTES} bytes")
            except Refused as error:
                return refusal(400, str(error), error.param)
            except (ValueError, RecursionError) as error:
                return refusal(400, f"no JSON: {error}")
            made = Answer(served, form, asked)
            if asked.stream:
                return StreamingResponse(made.events(), media_type="text/event-stream",
                                         headers={"cache-control": "no-store"})  # fmt: skip
            return await made.whole(request)

        app.add_api_route(path, answer, methods=["POST"], response_model=None)

    async def models(request: Request) -> Response:
        try:
            tokens.check(request.headers.get("authorization"), "read")
        except ApiError as error:
            return refusal(error.status, error.detail)
        model = {"id": served.name, "object": "model", "created": 0, "owned_by": "rlhf-orchestrate"}
        return JSONResponse({"object": "list", "data": [model | {"max_model_len": served.context}]})

    async def health() -> Response:
        return PlainTextResponse("ok\n")

    route("/v1/chat/completions", "chat", forms.of_chat)
    route("/v1/completions", "completion", forms.of_completion)
    route("/inference/v1/generate", "tokens", forms.of_tokens)
    app.add_api_route("/v1/models", models, methods=["GET"], response_model=None)
    app.add_api_route("/healthz", health, methods=["GET"], response_model=None)
    return app


def refusal(status: int, message: str, param: str | None = None) -> JSONResponse:
    kind = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}.get(status)
    kind = kind or ("invalid_request_error" if status < 500 else "server_error")
    body = {"error": {"message": " ".join(message.split()), "type": kind, "param": param, "code": None}}
    return JSONResponse(body, status)


class Answer:
    """One request's streams, told in its form."""

    def __init__(self, served: Served, form: Form, asked: Asked) -> None:
        self.served, self.form, self.asked = served, form, asked
        prefix = {"chat": "chatcmpl", "completion": "cmpl", "tokens": "gen"}[form]
        self.id, self.created = f"{prefix}-{secrets.token_hex(12)}", int(time.time())
        self.streams: list[Stream] = []
        for number, prompt in enumerate(asked.prompts):
            group = asked.group(number)
            self.streams += [Stream(prompt, asked.sampling[number], group, i, asked.stream) for i in range(asked.n)]
        self.texts = [Text(served.chat.tokenizer, stream, asked) for stream in self.streams]

    async def whole(self, request: Request) -> Response:
        self._start()
        work = asyncio.gather(*(self._finished(text) for text in self.texts))
        gone = asyncio.create_task(_gone(request))
        try:
            either: set[asyncio.Future[Any]] = {work, gone}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            work.cancel()  # nothing, where it is done
            for stream in self.streams:
                stream.dropped = True
        failed = next((stream.error for stream in self.streams if stream.error is not None), None)
        if failed is not None or any(text.finish is None for text in self.texts):
            return refusal(503, failed or "the client has gone")
        choices = [self._choice(i, text, text.safe, 0, whole=True) for i, text in enumerate(self.texts)]
        if self.form == "tokens":
            return JSONResponse({"request_id": self.id, "choices": choices, "prompt_logprobs": None})
        more = {"prompt_token_ids": list(self.asked.prompts[0])} if self.asked.token_ids else {}
        return JSONResponse(self._envelope(choices, "") | {"usage": self._usage()} | more)

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events: the streams' pieces as they come, interleaved."""
        self._start()
        pieces: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._tell(i, text, pieces)) for i, text in enumerate(self.texts)]
        left = len(tasks)
        try:
            if self.form == "chat":
                for i in range(left):
                    yield _event(self._chunk({"index": i, "delta": {"role": "assistant", "content": ""}}))
            while left:
                piece = await pieces.get()
                if piece is None:
                    left -= 1
                elif "error" in piece:
                    yield _event(piece)
                    return
                else:
                    yield _event(self._chunk(piece))
            if self.asked.usage and self.form != "tokens":
                yield _event(self._envelope([], ".chunk") | {"usage": self._usage()})
            yield DONE
        finally:
            for task in tasks:
                task.cancel()
            for stream in self.streams:
                stream.dropped = True

    def _start(self) -> None:
        for stream in self.streams:
            self.served.gateway.start(stream)

    async def _finished(self, text: Text) -> None:
        async with aclosing(text.stream.pieces()) as pieces:
            async for _ in pieces:
                text.read()
                if text.finish is not None:
                    return

    async def _tell(self, i: int, text: Text, pieces: asyncio.Queue[dict[str, Any] | None]) -> None:
        told_tokens, told = 0, 0
        async with aclosing(text.stream.pieces()) as news:
            async for _ in news:
                text.read()
                if text.stream.error is not None:
                    pieces.put_nowait({"error": {"message": text.stream.error, "type": "server_error"}})
                    return
                safe = text.safe
                if len(safe) > told or text.finish is not None or (self.form == "tokens" and text.count > told_tokens):
                    pieces.put_nowait(self._choice(i, text, safe[told:], told_tokens, whole=False))
                    told, told_tokens = len(safe), text.count
                if text.finish is not None:
                    break
        pieces.put_nowait(None)

    # --- forms -----------------------------------------------------------------------------------------------------

    def _envelope(self, choices: list[dict[str, Any]], suffix: str) -> dict[str, Any]:
        kind = "chat.completion" if self.form == "chat" else "text_completion"
        kind += suffix if self.form == "chat" else ""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.served.name, "choices": choices}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        if self.form == "tokens":
            return {"request_id": self.id, "choices": [choice]}
        return self._envelope([{"finish_reason": None, "logprobs": None, **choice}], ".chunk")

    def _choice(self, i: int, text: Text, new: str, first: int, *, whole: bool) -> dict[str, Any]:
        """With the text `new` and the tokens from the `first` on; `whole`: as an answer that is no stream has it."""
        more = ({"logprobs": None} if whole else {}) | self._tokens(text, first)
        if self.form == "tokens":
            return {"index": i, "finish_reason": text.finish, **more}
        if self.form == "completion":
            return {"index": i, "text": new, "finish_reason": text.finish, **more}
        calls = text.calls if text.finish is not None else []
        more |= {"index": i, "finish_reason": "tool_calls" if calls else text.finish}
        if whole:
            said = {"content": new or None, "tool_calls": calls} if calls else {"content": new}
            return more | {"message": {"role": "assistant", **said}}
        numbered = {"tool_calls": [{"index": k, **call} for k, call in enumerate(calls)]} if calls else {}
        return more | {"delta": ({"content": new} if new else {}) | numbered}

    def _tokens(self, text: Text, first: int) -> dict[str, Any]:
        """Log-probabilities and token ids from the `first` on, as the form has them."""
        ids, values = text.stream.tokens[first : text.count], text.stream.logprobs[first : text.count]
        more: dict[str, Any] = {"token_ids": ids} if self.form == "tokens" or self.asked.token_ids else {}
        if not self.asked.logprobs:
            return more
        if self.form == "completion":
            names = [self.served.chat.tokenizer.id_to_token(t) or "" for t in ids]
            return more | {"logprobs": {"tokens": names, "token_logprobs": values, "top_logprobs": None,
                                        "text_offset": []}}  # fmt: skip
        return more | {"logprobs": {"content": [self._logprob(t, v) for t, v in zip(ids, values, strict=True)]}}

    def _logprob(self, token: int, value: float) -> dict[str, Any]:
        if self.form == "tokens":
            return {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
        name = self.served.chat.tokenizer.decode([token], skip_special_tokens=False)
        return {"token": name, "logprob": value, "bytes": list(name.encode()), "top_logprobs": []}

    def _usage(self) -> dict[str, int]:
        prompts = sum(map(len, self.asked.prompts))
        made = sum(text.count for text in self.texts)
        return {"prompt_tokens": prompts, "completion_tokens": made, "total_tokens": prompts + made}


async def _gone(request: Request) -> None:
    """Returns when the client has closed the request (its body has been read)."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"
