"""The fork server: a small Python of its own, without the caller's memory, environment or files, that forks each run.

    sandbox (local.py) -- a socket for each run -->  fork server --fork-->  supervisor --> outer --> init --> program
                       <-- the result on it -------------------------------------'

request and result: 8 bytes of length, then JSON: {"code", "language", "stdin", "files": {path: base64}, "limits": {..}}
and {"status", "code", "stdout", ...} as Result, or {"error": one line} where the sandbox failed.

A Python program runs in the process that was forked: it starts in milliseconds, its hash seed is 0 so that it does the
same again. When the caller closes the run's socket, or is gone, the run is killed; when the caller closes the control
socket the server ends, and with it all runs.
"""

import base64
import contextlib
import dataclasses
import gc
import io
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from functions.sandbox import isolation
from functions.sandbox.program import Limits, Program, Result, SandboxError, Status

SETUP_S = 20.0
"""How long a run may take until its program's first instruction."""
POLL_S = 0.01
"""Between looks at its memory."""
WORTH_LOADING = ("bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools",
                 "math", "operator", "re", "string", "typing")  # fmt: skip
"""What programs import most, and has no state of its own."""
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1",
               "OMP_NUM_THREADS": "1"}  # fmt: skip


class Inside(BaseException):
    """Unwinds the stack of the process that becomes the program."""

    def __init__(self, program: Program) -> None:
        self.program = program


def main(root: str) -> None:
    """Standard input is the control socket; `root` is the directory that this package was found in."""
    sys.path[:] = [path for path in sys.path if path != root]
    for name in WORTH_LOADING:
        __import__(name)
    control = socket.socket(fileno=os.dup(0))
    try:
        isolation.check_machine()
        isolation.prepare()
    except (SandboxError, OSError) as error:
        control.send(json.dumps({"error": str(error)}).encode())
        return
    gc.collect()
    gc.freeze()  # pages stay shared
    control.send(b'{"ready": true}')
    program = None
    try:
        _serve(control)
    except Inside as inside:
        program = inside.program
    if program is not None:
        _become(program)


def _serve(control: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors need not be waited for
    own = os.getpid()
    while True:
        message, descriptors, *_ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        run = socket.socket(fileno=descriptors[0])
        try:
            if os.fork() == 0:
                control.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _supervise(run, own)  # raises Inside in the process that becomes the program, else ends
        except OSError as error:
            _send(run, {"error": f"cannot start a process: {error.strerror}"})
        run.close()


# --- the supervisor --------------------------------------------------------------------------------------------------


def _supervise(run: socket.socket, server: int) -> None:
    begun_s = time.monotonic()
    try:
        isolation.LIBC.prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG
        isolation.LIBC.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        if os.getppid() != server:
            os._exit(1)
        answer = dataclasses.asdict(_Run(run, _program(_receive(run)), begun_s).result())
    except Exception as error:
        answer = {"error": " ".join(str(error).split()) or type(error).__name__}
    with contextlib.suppress(OSError):
        _send(run, answer)
    os._exit(0)


class _Run:
    """One run, seen from outside of it."""

    def __init__(self, caller: socket.socket, program: Program, begun_s: float) -> None:
        self.caller, self.program, self.begun_s = caller, program, begun_s
        limit = program.limits.output_kb << 10
        ours, theirs = zip(*(os.pipe() for _ in range(3)), strict=True)
        self.report, self.streams = ours[0], {ours[1]: bytearray(), ours[2]: bytearray()}
        stdin = _sealed(program.stdin.encode("utf-8", "surrogatepass"))
        own = os.getpid()
        self.outer = os.fork()
        if self.outer == 0:
            caller.close()
            for descriptor in ours:
                os.close(descriptor)
            _outer(program, stdin, theirs, own)
        for descriptor in (*theirs, stdin):
            os.close(descriptor)
        self.limit, self.said, self.ready_s = limit, b"", 0.0

    def result(self) -> Result:
        status: Status = "finished"
        open_ = {self.report, *self.streams}
        while open_:
            ended = self._over()
            if ended is not None:
                status = ended
                break
            for end in select.select([*open_, self.caller], [], [], POLL_S)[0]:
                if end is self.caller:
                    self.kill()
                    os._exit(0)  # nobody waits for the result
                block = os.read(end, 1 << 16)
                if not block:
                    open_.discard(end)
                elif end == self.report:
                    self.said += block
                    if not self.ready_s and b"ready\n" in self.said:
                        self.ready_s = time.monotonic()
                else:
                    self.streams[end] += block
        seconds = time.monotonic() - self.ready_s
        self.kill()
        return self._result(status, seconds)

    def _over(self) -> Status | None:
        """The limit that the run has passed."""
        now_s, limits = time.monotonic(), self.program.limits
        if not self.ready_s:
            if now_s - self.begun_s > SETUP_S:
                self.kill()
                raise SandboxError(f"the sandbox has not started within {SETUP_S:g} s")
            return None
        if now_s - self.ready_s > limits.timeout_s:
            return "timeout"
        if any(len(text) > self.limit for text in self.streams.values()):
            return "output"
        processes, most = list(_descendants(self.outer)), limits.memory_mb << 20
        if sum(map(_resident, processes)) > most and sum(map(_proportional, processes)) > most:
            return "memory"
        return None

    def kill(self) -> None:
        """All of the run's processes; returns when they are gone."""
        while (left := _children(os.getpid())) != []:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in left:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)

    def _result(self, status: Status, seconds: float) -> Result:
        lines = dict(line.partition(b" ")[::2] for line in self.said.splitlines())
        if b"error" in lines:
            raise SandboxError(lines[b"error"].decode())
        if not self.ready_s or (status == "finished" and b"exit" not in lines):
            raise SandboxError("the sandbox ended before its program did")
        code = int(lines[b"exit"]) if b"exit" in lines else -signal.SIGKILL
        out, err = (bytes(text[: self.limit]).decode("utf-8", "replace") for text in self.streams.values())
        return Result(status, code, out, err, round(seconds, 6), round(self.ready_s - self.begun_s, 6))


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _descendants(pid: int) -> Iterator[int]:
    yield pid
    for child in _children(pid):
        yield from _descendants(child)


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _proportional(pid: int) -> int:
    """As resident, with what processes share counted once among them: slower to read."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except PermissionError:
        return _resident(pid)


def _sealed(data: bytes) -> int:
    """A file in memory that nobody can change any more."""
    import fcntl

    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, 1033, 0xF)  # F_ADD_SEALS: seal, shrink, grow, write
    return descriptor


# --- inside ----------------------------------------------------------------------------------------------------------


def _outer(program: Program, stdin: int, ends: tuple[int, ...], supervisor: int) -> None:
    report, out, err = ends
    try:
        isolation.enter(program.limits)
        isolation.LIBC.prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG
        for path, data in {**program.files, f"main.{'py' if program.language == 'python' else 'sh'}":
                           program.code.encode("utf-8", "surrogatepass")}.items():  # fmt: skip
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(data)
        alive, held = os.pipe()
        init = os.fork()
        if init == 0:
            os.close(held)
            _init(program, stdin, (report, out, err), alive)
        for descriptor in (stdin, report, out, err, alive):
            os.close(descriptor)
        os.waitpid(init, 0)
    except Exception as error:
        _fail(report, error)
    os._exit(0)


def _init(program: Program, stdin: int, ends: tuple[int, ...], alive: int) -> None:
    report, out, err = ends
    try:
        os.setsid()
        isolation.lock(program.limits)
        isolation.die_with(alive)
        pid = os.fork()
        if pid == 0:
            for target, source in enumerate((stdin, out, err)):
                os.dup2(source, target)
            os.write(report, b"ready\n")
            os.closerange(3, 1 << 20)
            raise Inside(program)
        for descriptor in (stdin, out, err):
            os.close(descriptor)
        while (ended := os.wait())[0] != pid:
            pass
        os.write(report, f"exit {os.waitstatus_to_exitcode(ended[1])}\n".encode())
    except Exception as error:
        _fail(report, error)
    os._exit(0)


def _fail(report: int, error: Exception) -> None:
    with contextlib.suppress(OSError):
        os.write(report, f"error {' '.join(str(error).split()) or type(error).__name__}\n".encode())


def _become(program: Program) -> None:
    for each in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError):
            signal.signal(each, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    if program.language == "bash":
        os.execve("/bin/bash", ["bash", "main.sh"], ENVIRONMENT)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in [name for name in sys.modules if name.partition(".")[0] == "functions"]:
        del sys.modules[name]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        errors = "backslashreplace" if number == 2 else "surrogateescape"
        raw = open(number, "wb" if number else "rb", closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(raw, "utf-8", errors, line_buffering=number == 2)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__="/tmp/main.py", __builtins__=__builtins__)
    sys.modules["__main__"] = main
    sys.argv[:], sys.path[:0] = ["main.py"], ["/tmp"]
    try:
        exec(compile(program.code, "/tmp/main.py", "exec"), main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:  # as the interpreter would, without our own frames
        trace = error.__traceback__
        traceback.print_exception(error.with_traceback(trace.tb_next if trace else None))
        raise SystemExit(1) from None


# --- messages --------------------------------------------------------------------------------------------------------


def _program(request: dict[str, Any]) -> Program:
    files = {path: base64.b64decode(data) for path, data in request["files"].items()}
    return Program(**(request | {"files": files, "limits": Limits(**request["limits"])}))


def _send(to: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    to.sendall(len(data).to_bytes(8, "big") + data)


def _receive(source: socket.socket) -> Any:
    return json.loads(_exactly(source, int.from_bytes(_exactly(source, 8), "big")))


def _exactly(source: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        block = source.recv(min(count - len(data), 1 << 20))
        if not block:
            raise EOFError("the other side is gone")
        data += block
    return bytes(data)
