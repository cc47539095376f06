"""The HTTP shell that every function shares: FastAPI around one Function object.

    HTTP thread (uvicorn)                                main thread
    POST /v1/call -- Attempt --> queue ----------------> Attempt.run: the function works
         <--- event lines, heartbeats <----- send ------

The function has the main thread: there its time limits can use signals, and its engines find what they expect. The
HTTP thread beats the heart while the main thread computes, and hears SIGTERM at once (a wakeup descriptor, so that it
need not wait for C code to return).

POST /v1/call           Call (JSON) -> 200 and a stream of event lines; closing the request cancels the call
                        401 no or a wrong token, 413 too large, 422 not a Call, 503 draining, or one is open already
GET  /healthz/live      200
GET  /healthz/ready     200, or 503 while draining

A call whose deadline passes ends in a *retryable* error: a hung device is the likely cause, what was finished is
recorded, and a repeated call takes up the rest. SIGTERM drains: no new calls; the open one finishes, or is cut when
the grace is near its end; then the process exits with 0. So does a broken replica (ReplicaBroken).

Before its first call comes, the main thread loads what that will probably want (preload.py); the replica is ready and
idle meanwhile, a call that comes waits for the thread as it does behind another, and SIGTERM ends the process at once.
"""

import asyncio
import contextlib
import hmac
import json
import logging
import math
import os
import queue
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from functions.base.http_limits import TooLarge, bounded_body, limited_server
from functions.base.logs import About, catch_printed, finish_printed, log_lines
from functions.base.wire import Call, Event
from functions.exchange.base import check_key
from functions.server.attempt import Attempt, Outcome
from functions.server.control import Control
from functions.server.settings import Settings
from functions.server.work import Work

log = logging.getLogger(__name__)

STUCK_EXIT = 70
LARGEST_CALL_BYTES = 64 << 20
"""A call has prompts, never samples: those are in the exchange. A prompt group of 32,000 tokens is 0.2 MB of JSON."""
ANSWERED_S = 1.0
"""How long a call waits for the one before it to be closed: its caller may be gone without our knowing it yet."""


@dataclass(eq=False)
class Open:
    """One call that is open here, seen from the HTTP thread."""

    attempt: Attempt
    lines: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    """What the main thread sends; None when the attempt has ended."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    """The request is closed, by whichever side."""
    since_s: float = field(default_factory=time.monotonic)

    @property
    def over(self) -> bool:
        return self.ended.is_set() and self.answered.is_set()


class EventStream(StreamingResponse):
    """A stream that tells when it is closed, also when the caller had gone before its first line."""

    def __init__(self, lines: AsyncIterator[bytes], closed: Callable[[], None]) -> None:
        super().__init__(lines, media_type="application/x-ndjson", headers={"cache-control": "no-store"})
        self.closed = closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.closed()


def problem(status: int, title: str, detail: str, **headers: str) -> JSONResponse:
    """RFC 9457."""
    body = {"type": "about:blank", "title": title, "status": status, "detail": detail}
    headers |= {"retry-after": "1"} if status == 503 else {}
    return JSONResponse(body, status, headers=headers, media_type="application/problem+json")


class Server:
    """The state of a replica as its HTTP thread sees it. `submit` hands an attempt to the main thread (None: leave);
    `leave` ends the process, whatever the main thread does."""

    def __init__(self, settings: Settings, submit: Callable[[Open | None], None], leave: Callable[[], None]) -> None:
        self.settings = settings
        self.submit = submit
        self.leave = leave
        self.started_s = time.monotonic()
        self.open: Open | None = None
        self.draining = False
        self.parked = False
        """It has left its accelerator, and takes no calls until it is back."""
        self.parked_s = 0.0
        """How long the process was parked before it became this replica."""
        self.loading = False
        """The main thread loads ahead, for nobody yet. It sets this before it looks at `draining`."""
        self.epoch = 0
        self.accepted = 0
        self._tasks: set[asyncio.Task[None]] = set()

    # --- calls -----------------------------------------------------------------------------------------------------

    async def call(self, request: Request) -> Response:
        token = self.settings.token
        given = request.headers.get("authorization", "")
        if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            return problem(401, "no or a wrong token", "send the job's token: Authorization: Bearer TOKEN")
        if self.draining:
            return problem(503, "draining", f"replica {self.settings.name} takes no new calls: it is being stopped")
        if self.parked:
            return problem(503, "parked", f"the process of {self.settings.name} is parked")
        try:
            call = Call.from_json(json.loads(await bounded_body(request, LARGEST_CALL_BYTES)))
            check_key(call.prefix + "events")
            if not (math.isfinite(call.deadline_s) and call.deadline_s > 0):
                raise ValueError(f"deadline_s is {call.deadline_s}, wants a number of seconds above 0")
        except TooLarge:
            return problem(413, "too large", f"a call has at most {LARGEST_CALL_BYTES} bytes", connection="close")
        except ClientDisconnect:  # nobody hears this
            return problem(408, "not whole", "the request ended before its body")
        except (ValueError, RecursionError) as error:
            return problem(422, "not a Call", " ".join(str(error).split()))
        if call.epoch < self.epoch:
            message = f"stale orchestrator: its lease has epoch {call.epoch}, epoch {self.epoch} has been seen here"
            line = Event("error", data={"kind": "fatal", "message": message}).to_line()
            return Response(line, media_type="application/x-ndjson")
        if self.open is not None and not await _within(ANSWERED_S, self.open.answered):
            detail = f"replica {self.settings.name} works on call {self.open.attempt.call.id}; one call at a time"
            return problem(503, "busy", detail)
        self.epoch = call.epoch
        loop, lines = asyncio.get_running_loop(), asyncio.Queue[bytes | None]()
        opened = Open(Attempt(call, lambda line: _post(loop, lines, line)), lines)
        self.open = opened
        self.submit(opened)  # behind one that was cancelled and has not ended yet
        return EventStream(self._lines(opened), lambda: self._closed(opened))

    async def _lines(self, opened: Open) -> AsyncIterator[bytes]:
        attempt, begun_s = opened.attempt, opened.since_s
        deadline_s = begun_s + attempt.call.deadline_s
        about = {"replica": self.settings.name, "calls": self.accepted, "up_s": round(begun_s - self.started_s, 4)}
        about["parked_s"] = round(self.parked_s, 4)
        self.accepted += 1
        yield Event("started", data=about).to_line()
        while True:
            now_s = time.monotonic()
            if now_s >= deadline_s:
                limit_s = attempt.call.deadline_s
                message = f"call {attempt.call.id} went beyond its deadline of {limit_s:g} s"
                yield Event("error", data={"kind": "retryable", "message": message, "deadline_s": limit_s}).to_line()
                return
            try:
                line = await asyncio.wait_for(opened.lines.get(), min(self.settings.heartbeat_s, deadline_s - now_s))
            except TimeoutError:
                elapsed_s = round(time.monotonic() - begun_s, 3)
                yield Event("progress", data={"elapsed_s": elapsed_s, **attempt.progress}).to_line()
                continue
            if line is None:
                return
            yield line

    def _closed(self, opened: Open) -> None:
        """The request is closed: whatever the attempt still does is for nobody."""
        opened.attempt.cancelled.set()
        opened.answered.set()
        self._leave_loading()
        if opened.ended.is_set():
            self._over(opened)
        else:
            task = asyncio.get_running_loop().create_task(self._await_end(opened))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _await_end(self, opened: Open) -> None:
        if not await _within(self.settings.stuck_s, opened.ended):
            call, stuck_s = opened.attempt.call.id, self.settings.stuck_s
            log.error("call %s goes on %g s after it was cancelled: exit", call, stuck_s)
            os._exit(STUCK_EXIT)

    def ended(self, opened: Open, outcome: Outcome) -> None:
        """The main thread is done with an attempt (called in the HTTP thread)."""
        opened.ended.set()
        opened.lines.put_nowait(None)
        if outcome == "broken":
            self.drain()
        if opened.answered.is_set():
            self._over(opened)

    def _over(self, opened: Open) -> None:
        if self.open is opened:
            self.open = None
            if self.draining:
                self.submit(None)

    async def rests(self) -> bool:
        """Whether no call is open and none will come before it is told otherwise; one whose answer is being closed is
        waited for."""
        if self.open is not None and await _within(ANSWERED_S, self.open.ended):
            opened = self.open
            if opened is not None:
                await _within(ANSWERED_S, opened.answered)
        return self.open is None and not self.draining

    def renamed(self, settings: Settings) -> None:
        """Another life of the process begins."""
        self.settings, self.accepted, self.started_s = settings, 0, time.monotonic()

    # --- drain, health ---------------------------------------------------------------------------------------------

    def drain(self) -> None:
        if self.draining:
            return
        self.draining = True
        self._leave_loading()
        if self.open is None:
            self.submit(None)
        else:
            grace_s = self.settings.grace_s
            asyncio.get_running_loop().call_later(grace_s - min(10.0, grace_s / 3), self._cut_open)

    def _leave_loading(self) -> None:
        """Ends the process where it is to go, and loads for nobody."""
        if self.draining and self.loading and (self.open is None or self.open.answered.is_set()):
            log.info("told to go while it loads: exit")
            self.leave()

    def _cut_open(self) -> None:
        if self.open is not None:
            self.open.attempt.cut.set()

    def app(self) -> FastAPI:
        app = FastAPI(title="rlhf-orchestrate function", docs_url=None, redoc_url=None, openapi_url=None)

        async def live() -> Response:
            return PlainTextResponse("ok\n")

        async def ready() -> Response:
            return problem(503, "draining", "takes no new calls") if self.draining else PlainTextResponse("ok\n")

        app.add_api_route("/v1/call", self.call, methods=["POST"], response_model=None)
        app.add_api_route("/healthz/live", live, methods=["GET"], response_model=None)
        app.add_api_route("/healthz/ready", ready, methods=["GET"], response_model=None)
        return app

    def shell(self) -> uvicorn.Server:
        more = {"loop": "asyncio", "timeout_graceful_shutdown": 10, "headers": [("connection", "close")]}
        return limited_server(self.app(), lifespan="off", **more)


async def _within(timeout_s: float, event: asyncio.Event) -> bool:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return False
    return True


def _post(loop: asyncio.AbstractEventLoop, lines: asyncio.Queue[bytes | None], line: bytes) -> None:
    loop.call_soon_threadsafe(lines.put_nowait, line)


# --- the process -----------------------------------------------------------------------------------------------------


def serve(settings: Settings, listener: socket.socket, control: socket.socket | None = None) -> None:
    """Runs a replica on `listener` (bound and listening) until it has drained. Main thread only.

    `control`: the socket to the agent that has forked it; one that has none never parks.
    """
    about = About({"job": settings.job, "function": settings.function or settings.kind, "replica": settings.name})
    log_lines(about)
    catch_printed()
    scratch = settings.scratch or tempfile.mkdtemp(prefix="rlhf-function-")

    def leave() -> None:
        finish_printed()
        if not settings.scratch:
            shutil.rmtree(scratch, ignore_errors=True)
        os._exit(0)

    work = Work(settings, scratch, about)
    server = Server(settings, work.queue.put, leave)
    shell = server.shell()
    started: queue.SimpleQueue[asyncio.AbstractEventLoop] = queue.SimpleQueue()
    woken, wakeup = socket.socketpair()
    woken.setblocking(False)
    wakeup.setblocking(False)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(woken, on_signal)
        if control is not None:
            Control(control, server, work, about).listen(loop)
        loop.call_soon(started.put, loop)
        await shell.serve(sockets=[listener])

    def on_signal() -> None:
        with contextlib.suppress(BlockingIOError):
            if set(woken.recv(64)) & {signal.SIGTERM, signal.SIGINT}:
                server.drain()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: None)  # heard through the wakeup descriptor
    signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=asyncio.run, args=(main(),), name="http", daemon=True)
    thread.start()
    loop = started.get()
    try:
        work.run(server, loop)
    finally:
        finish_printed()
        shell.should_exit = True
        thread.join()
        if not settings.scratch:
            shutil.rmtree(scratch, ignore_errors=True)


def set_threads(threads: int) -> None:
    """Threads of the numeric libraries: by environment for those not loaded yet, by call for torch if it is."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)


def main() -> None:
    settings, where = Settings.from_command_line(sys.argv[1:])
    set_threads(settings.threads)
    serve(settings, where.listen())
