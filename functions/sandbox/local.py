"""The sandbox of this machine: one fork server (parent.py), kept until it is closed, started again when it is gone."""

import base64
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Self

from functions.sandbox.parent import _receive, _send
from functions.sandbox.program import Limits, Program, Result, Sandbox, SandboxError
from functions.sandbox.remote import RemoteSandbox

ATTEMPTS = 3


class LocalSandbox:
    """Starts its fork server at once. Raises SandboxError, one line, where this machine does not allow a sandbox."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        root = str(Path(__file__).parents[2])
        code = f"import sys; sys.path.insert(0, {root!r}); from functions.sandbox.parent import main; main({root!r})"
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {"PYTHONUTF8": "1", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.defpath}
        try:
            with theirs:
                self._server = subprocess.Popen(
                    [sys.executable, "-s", "-P", "-c", code], stdin=theirs.fileno(), stdout=subprocess.DEVNULL,
                    env=environment, cwd="/", start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise SandboxError(f"no sandbox here: {sys.executable} does not start: {error.strerror}") from error
        try:
            said = json.loads(self._control.recv(1 << 16) or b"{}")
        except (OSError, ValueError):
            said = {}
        if "ready" not in said:
            self.close()
            raise SandboxError(f"no sandbox here: {said.get('error', 'its fork server does not start')}")

    def run(self, program: Program) -> Result:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._run(program)
            except (SandboxError, OSError, EOFError) as error:
                if attempt == ATTEMPTS:
                    raise SandboxError(f"the sandbox failed {ATTEMPTS} times: {error}") from error
                with self._lock:
                    if self._server.poll() is not None:
                        self.close()
                        self._start()
        raise AssertionError("unreachable")

    def _run(self, program: Program) -> Result:
        files = {path: base64.b64encode(data).decode() for path, data in program.files.items()}
        request = {"code": program.code, "language": program.language, "stdin": program.stdin, "files": files}
        ours, theirs = socket.socketpair()
        with ours:
            with theirs, self._lock:
                socket.send_fds(self._control, [b"r"], [theirs.fileno()])
            _send(ours, request | {"limits": asdict(program.limits)})
            answer = _receive(ours)
        if "error" in answer:
            raise SandboxError(answer["error"])
        return Result(**answer)

    def close(self) -> None:
        """The fork server and all runs end."""
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(5)
        if self._server.poll() is None:
            self._server.kill()
            self._server.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_sandbox(url: str | None) -> Sandbox:
    """A service's sandbox; None: this machine's. Raises SandboxError where it does not allow one."""
    return LocalSandbox() if url is None else RemoteSandbox(url)


def check_here() -> None:
    """Raises SandboxError, one line, where programs cannot be run in a sandbox on this machine."""
    with LocalSandbox() as sandbox:
        result = sandbox.run(Program("print(6 * 7)", limits=Limits(timeout_s=60)))
    if result.stdout != "42\n":
        raise SandboxError(f"no sandbox here: a program that prints 42 gave {result}")
