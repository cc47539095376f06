"""How a forkserver (forkserver.py) is kept, and asked for an agent. It imports nothing of what agents load."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from functions.server.settings import listen_unix

FORKSERVER = "RLHF_FORKSERVER"
"""The environment variable by which orchestrators find it: the path of its Unix socket."""
ONE_HEAP = {"MALLOC_ARENA_MAX": "1"}
"""Else glibc keeps up to 64 MB for each thread that has freed them, also of a process that parks (malloc_trim(3))."""
READ = re.compile("PYTHON|LD_|MALLOC_|CUDA|NVIDIA|TORCH_|PYTORCH_|HF_|HUGGINGFACE|TRANSFORMERS|HOME$|XDG_|LANG|LC_|TZ$")
ANSWERS_S = 300.0
"""How long a client waits for an agent, at most; the first waits for the libraries, on a machine however busy."""


def identity(env: Mapping[str, str]) -> str:
    """Of a process that begins now with `env`: what it would load, and what it is held to."""
    code = [*sorted(Path(__file__).parents[1].rglob("*.py")), Path(sysconfig.get_path("purelib"))]
    loaded = [(str(path), (stat := path.stat()).st_mtime_ns, stat.st_size) for path in code]
    read = sorted((name, value) for name, value in env.items() if READ.match(name))
    held = [os.readlink(f"/proc/self/ns/{space}") for space in ("mnt", "net", "pid", "user")]
    limits = Path("/proc/self/limits").read_text()
    return sha256(repr((sys.executable, loaded, read, held, limits)).encode()).hexdigest()


@contextlib.contextmanager
def keep(env: Mapping[str, str]) -> Iterator[str]:
    """A forkserver with `env`, until the block or this process ends; its path."""
    directory = tempfile.mkdtemp(prefix="rlhf-forkserver-")
    path = f"{directory}/socket"
    with listen_unix(path) as listener:
        words = [sys.executable, "-m", "functions.server.forkserver", path, str(listener.fileno())]
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], start_new_session=True,
            env={**env, **ONE_HEAP},
        )  # fmt: skip
    with process:  # closes its standard input, and waits
        yield path


def ask(path: str, arguments: Sequence[str], env: Mapping[str, str], client: socket.socket, log: int) -> None:
    """Has the forkserver at `path` fork an agent, told `arguments`, that serves `client` and writes to the descriptor
    `log`. Raises OSError, in a line, where it does not."""
    wanted = {"identity": identity(env), "arguments": list(arguments), "env": dict(env), "directory": os.getcwd()}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(ANSWERS_S)
        asking.connect(path)
        socket.send_fds(asking, [b" "], [client.fileno(), log])
        asking.sendall(json.dumps(wanted).encode())
        asking.shutdown(socket.SHUT_WR)
        if (answer := asking.recv(4096)) != b"forked":
            raise ConnectionRefusedError(answer.decode() or "the forkserver has ended")
