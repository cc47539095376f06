"""An agent's harness as an environment: it speaks OpenAI's API to a URL of its episode's own, and needs no change.

    run(base_url)  --POST base_url/chat/completions-->  a request ends the wait of `act`: what it adds to the episode
                                                        is appended at mask 0, the sample goes on, wherever
                   <--answer--  the next `act` brings the turn: tokens, log-probabilities, text

The harness runs in a thread of the environment's replica, from its first request to its return; so no GPU waits for
it. On another replica it is begun again, and gets the recorded turns as answers: it has to ask the same again.

    base_url = http://127.0.0.1:PORT/episodes/KEY/v1
    POST .../v1/chat/completions, .../v1/messages; .../inference/v1/generate beside v1; GET .../v1/models
"""

import asyncio
import json
import queue
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from functools import cache
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from functions.base.http_limits import TooLarge, bounded_body
from functions.environment.base import Answer, EnvironmentFailed, Said, Unrestored
from functions.environment.requests import Asked, Form, Refused, answer, events, parse

LARGEST_BYTES = 32 << 20
NO_ROOM = "this episode has no room or no turn left (context_length_exceeded)"


class HarnessEpisode(Unrestored):
    """`run(base_url)` is the harness; `reward(said)` what it is worth once it has returned (None: not said here)."""

    def __init__(self, name: str, run: Callable[[str], Any], reward: Callable[[Said], float | None]) -> None:
        self._name, self._run, self._reward = name, run, reward
        self._url, self._key = "", secrets.token_urlsafe(16)
        self._lock = threading.Lock()
        self._news: queue.SimpleQueue[dict[str, Any] | BaseException | None] = queue.SimpleQueue()
        """What requests add, and at last how the harness has ended."""
        self._turn = 0
        self._asked: Asked | None = None
        """The latest request."""
        self._said: Said | None = None
        """The answer to it, once there is one."""
        self._told: Future[Said] = Future()
        self._over = self._returned = False
        self._refused = False
        """Whether a request came after the end."""

    def begin(self, row: Mapping[str, Any], seed: int) -> None:
        served = desk()
        served.episodes[self._key] = self
        self._url = f"http://127.0.0.1:{served.port}/episodes/{self._key}/v1"
        threading.Thread(target=self._work, name="harness", daemon=True).start()

    def _work(self) -> None:
        try:
            self._run(self._url)
        except BaseException as error:
            self._news.put(error)
        else:
            self._news.put(None)

    def act(self, said: Said | None) -> Answer:
        """What the harness asks after that; None: its first request."""
        if said is not None:
            self._tell(said)
        news = self._news.get()
        if isinstance(news, BaseException):
            raise news
        if news is None:
            if said is None:
                raise EnvironmentFailed(f"{self._name} has returned without a request")
            self._returned = True
            return Answer()
        told = [(str(m.get("role", "")), str(m.get("content", ""))) for m in news.get("messages", ())]
        return Answer(told or [("", f"{len(news['tokens'])} tokens")], asked=news)

    def reward(self, said: Said) -> float | None:
        """A harness that asks on where no turn is left, and raises for that, is worth 0."""
        with self._lock:
            self._over = True
        if said.cut_off:
            self._tell(said)
        elif self._said is None and not self._told.done():
            self._refused = True
            self._told.set_exception(Refused(NO_ROOM))
        if (failed := self._end()) is None:
            return self._reward(said)
        if self._refused:
            return 0.0
        raise failed

    def _end(self) -> BaseException | None:
        """Waits for it: how the harness has ended."""
        while not self._returned:
            news = self._news.get()
            if news is None or isinstance(news, BaseException):
                return news
        return None

    def close(self) -> None:
        desk().episodes.pop(self._key, None)
        with self._lock:
            self._over = True
            if not self._told.done():
                self._told.set_exception(Refused("this episode goes on elsewhere"))

    def ask(self, asked: Asked) -> tuple[Future[Said], str]:
        """The answer to a request, when it comes, and the request's id. The same request again gets the same answer.
        Raises Refused."""
        with self._lock:
            if asked == self._asked:
                return self._told, self._id
            if self._over:
                self._refused = True
                raise Refused(NO_ROOM)
            if self._asked is not None and self._said is None:
                raise Refused("a request of this episode is being answered; its turns come one after the other")
            adds = asked.whole if self._asked is None or self._said is None else asked.after(
                self._asked, self._said, self._id
            )  # fmt: skip
            self._turn += 1
            self._asked, self._said, self._told = asked, None, Future()
            self._news.put(adds)
            return self._told, self._id

    @property
    def _id(self) -> str:
        return f"{self._turn:04d}"

    def _tell(self, said: Said) -> None:
        with self._lock:
            self._said = said
            self._told.set_result(said)


class Desk:
    """The HTTP side of this process's episodes, on loopback alone; a key that nobody guesses is an episode's name."""

    def __init__(self) -> None:
        self.episodes: dict[str, HarnessEpisode] = {}
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        forms: Mapping[str, Form] = {
            "v1/chat/completions": "chat", "v1/messages": "messages", "inference/v1/generate": "tokens"
        }  # fmt: skip
        for path, form in forms.items():
            app.add_api_route(f"/episodes/{{key}}/{path}", self._route(form), methods=["POST"], response_model=None)
        app.add_api_route("/episodes/{key}/v1/models", self._models, methods=["GET"], response_model=None)
        listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(listening.getsockname()[1])
        config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None, access_log=False)
        server = uvicorn.Server(config)
        threading.Thread(target=server.run, args=([listening],), name="desk", daemon=True).start()

    async def _models(self) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "policy", "object": "model", "created": 0,
                                                         "owned_by": "rlhf-orchestrate"}]})  # fmt: skip

    def _route(self, form: Form) -> Callable[..., Any]:
        async def answered(key: str, request: Request) -> Response:
            try:
                body = json.loads(await bounded_body(request, LARGEST_BYTES))
                asked = parse(form, body)
                episode = self.episodes.get(key)
                if episode is None:
                    return refusal(form, 404, "there is no such episode here")
                future, id = episode.ask(asked)
                said = await asyncio.shield(asyncio.wrap_future(future))
            except (Refused, TooLarge, ValueError, RecursionError) as error:
                return refusal(form, 400, str(error) or "the request is too large")
            whole = answer(asked, said, id, str(body.get("model") or "policy"))
            if not asked.stream:
                return JSONResponse(whole)
            return StreamingResponse(_lines(form, whole), media_type="text/event-stream")

        return answered


async def _lines(form: Form, whole: Any) -> AsyncIterator[bytes]:
    for name, data in events(form, whole):
        text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
        yield (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def refusal(form: Form, status: int, message: str) -> JSONResponse:
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    error: dict[str, Any] = {"message": " ".join(message.split()), "type": kind}
    if form == "messages":
        return JSONResponse({"type": "error", "error": error}, status)
    code = "context_length_exceeded" if message == NO_ROOM else None
    return JSONResponse({"error": error | {"param": None, "code": code}}, status)


@cache
def desk() -> Desk:
    return Desk()
