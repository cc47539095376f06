"""Function objects for tests of server, platform and invoke, named by path: `.../functions_for_tests.py:Count`."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from functions.base.wire import Call, Event, Load
from functions.call.function import Context, FatalError, ReplicaBroken, RetryableError


class Count:
    """Operation `count`: one `samples` event for each index below params["n"], after params["pause_s"] each; from index
    params["hold"] on it waits for the file params["until"] (none: for ever), as its loading does for `load_until`.

    It takes up what is missing, can be cut (the rest in one `cut` event), and writes a line to params["log"] for each
    index that it works on: how often work was really done. It dies by SIGKILL at each index of params["kill_at"], once.
    """

    def __init__(self, *, pause_s: float = 0.0, load_until: str = "") -> None:
        self.pause_s = pause_s
        while load_until and not os.path.exists(load_until):
            time.sleep(0.01)

    def call(self, call: Call, context: Context) -> Iterator[Event]:
        if call.operation != "count":
            raise FatalError(f"Count has no operation {call.operation!r}")
        params = call.params
        done = {index for event in context.prior for index in event.data["index"]}
        context.progress({"prior": len(done)})
        todo = [index for index in range(params["n"]) if index not in done]
        while todo and not context.cut_requested():
            index = todo[0]
            if "log" in params:
                with open(params["log"], "a") as log:
                    log.write(f"{index} {os.getpid()}\n")
            until_s = time.monotonic() + params.get("pause_s", self.pause_s)
            held = index >= params.get("hold", params["n"])
            while not context.cut_requested():
                if time.monotonic() >= until_s and (not held or os.path.exists(params.get("until", ""))):
                    break
                context.check()
                time.sleep(0.01)
            if index in params.get("kill_at", ()) and not os.path.exists(f"{params['log']}.killed{index}"):
                open(f"{params['log']}.killed{index}", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            ref = context.exchange.put(f"{call.prefix}samples.{index:04d}", f"value {index}".encode())
            yield Event("samples", ref, {"index": [todo.pop(0)], "length": [3], "prompt_length": [2]})
        if todo:
            yield Event("cut", context.exchange.put(f"{call.prefix}cut.rest", b"rest"), {"index": todo})
        yield Event("done", data={"n": params["n"], "pid": os.getpid()})


class Fails:
    """Fails in the way that the operation names."""

    def call(self, call: Call, context: Context) -> Iterator[Event]:
        match call.operation:
            case "fatal":
                raise FatalError("the loss is nan\nat step 3")
            case "retryable":
                raise RetryableError("the device is away")
            case "broken":
                raise ReplicaBroken("half of the weights are new")
            case "odd":
                raise ZeroDivisionError("division by zero")
            case "nan":
                yield Event("done", data={"loss": float("nan")})
            case "no done":
                yield from ()
            case "started":
                yield Event("started")
            case "stubborn":
                while not os.path.exists(call.params["until"]):  # deaf to whatever it is told
                    time.sleep(0.01)
                yield Event("done")


class NeedsName:
    def __init__(self, *, name: str, size: int = 3) -> None:
        if size < 1:
            raise ValueError(f"size is {size}, wants 1 or more")
        self.name = name

    def call(self, call: Call, context: Context) -> Iterator[Event]:
        yield Event("done", data={"name": self.name})


class Speaks:
    """Reads its input, writes it twice over, and prints; in the phases `read` and `work`, `publish` within it."""

    def call(self, call: Call, context: Context) -> Iterator[Event]:
        with context.phase("read"):
            [ref] = call.inputs["samples"]
            data = context.exchange.get(ref)
        with context.phase("work"):
            print("half\nof a line", end="")
            print(context.meter.traceparent, file=sys.stderr)
            if call.operation == "fail":
                raise ValueError("no more")
            with context.phase("publish"):
                written = context.exchange.put(f"{call.prefix}twice", data * 2)
        yield Event("done", written, {"stats": {"samples": 4, "tokens": 40}, "metrics": MISMATCH, "failed": [{}]})


MISMATCH = {"rollout_corr/abs_diff_mean": 0.25}


class Loads:
    """Holds the versions it was told to load, and says so; loading `until` takes until that file is there."""

    def __init__(self, *, until: str = "") -> None:
        self.until = until
        self.held: list[str] = []

    def load_ahead(self, load: Load, context: Context) -> None:
        match load.operation:
            case "broken":
                raise ReplicaBroken("half of the weights are new")
            case "odd":
                raise ZeroDivisionError("division\nby zero")
        with context.phase("load"):
            if self.until:
                print(f"loading {load.operation}")
            self.held += [version.prefix for version in load.weights.values()]
            while self.until and not os.path.exists(self.until):
                time.sleep(0.01)

    def call(self, call: Call, context: Context) -> Iterator[Event]:
        with context.loading.timed():
            pass
        yield Event("done", data={"held": self.held, **context.loading.stats()})


class Forks:
    """Starts processes that a kill of its process group does not reach: in a session of their own, and orphans of one.
    Their pids go to params["log"]; then it works until it is killed, or it is done.
    """

    def call(self, call: Call, context: Context) -> Iterator[Event]:
        with open(call.params["log"], "a") as log:
            orphan = "sleep 1000 & echo $!"
            subprocess.run(["sh", "-c", orphan], stdout=log, start_new_session=True, check=True)
            log.write(f"{subprocess.Popen(['sleep', '1000'], start_new_session=True).pid}\n")
        while call.operation == "work":
            context.check()
            time.sleep(0.01)
        yield Event("done", data={"pid": os.getpid()})


class Eats:
    """Takes params["mb"] MB, in pieces of 16 MB each, and says what it may take."""

    def call(self, call: Call, context: Context) -> Iterator[Event]:
        eaten = [bytearray(16 << 20) for _ in range(call.params["mb"] // 16)]
        yield Event("done", data={"pieces": len(eaten), "limit": resource.getrlimit(resource.RLIMIT_DATA)[0]})


class Parks:
    """Holds a version and some memory, and parks (not before there is a file params["until"] of `hold`); or dies of it,
    as an operation said."""

    def __init__(self, *, size: int = 1) -> None:
        self.version: int | None = None
        self.parks, self.dies, self.memory, self.until = 0, "", b"", ""

    def park(self) -> int | None:
        while self.until and not os.path.exists(self.until):
            time.sleep(0.01)
        if self.dies == "dies_parking":
            os.kill(os.getpid(), signal.SIGKILL)
        self.parks += 1
        return self.version

    def unpark(self) -> None:
        if self.dies == "dies_waking":
            raise ReplicaBroken("the canary differs")

    def call(self, call: Call, context: Context) -> Iterator[Event]:
        told: dict[str, object] = {"secret": os.environ["SECRET"]} if "SECRET" in os.environ else {}
        match call.operation:
            case "hold":
                self.version, self.memory = call.params["version"], os.urandom(call.params.get("mb", 0) << 20)
                self.until = call.params.get("until", "")
            case "sleep":
                while True:
                    context.check()
                    time.sleep(0.01)
            case "spawn":
                told["child"] = subprocess.Popen(["sleep", "600"], start_new_session=True).pid
            case "dies_parking" | "dies_waking":
                self.dies = call.operation
        name = logging.getLogger().handlers[0]._about.process["replica"]  # type: ignore[attr-defined]
        yield Event(
            "done", data={"version": self.version, "name": name, "parks": self.parks, "pid": os.getpid(), **told}
        )
