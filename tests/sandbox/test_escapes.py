"""Programs that try to get out, or not to end: none does, each ends in time, and what it ends by is said.

All of it runs under limits that are not the sandbox's own (contained.py).
"""

from __future__ import annotations

import json
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from functions.sandbox.local import LocalSandbox
from functions.sandbox.parent import _send
from functions.sandbox.program import Limits, Program, Result
from tests.support.waiting import until

TIGHT = Limits(timeout_s=3, memory_mb=128, disk_mb=8, processes=16, output_kb=64)


def run(sandbox: LocalSandbox, code: str, language: str = "python", stdin: str = "") -> Result:
    return sandbox.run(Program(code, language, stdin, limits=TIGHT))  # type: ignore[arg-type]


def test_an_honest_program(sandbox: LocalSandbox) -> None:
    result = run(
        sandbox, "import sys\nprint(sum(map(int, input().split())))\nprint('e', file=sys.stderr)", stdin="2 3\n"
    )
    assert (result.status, result.code, result.stdout, result.stderr) == ("finished", 0, "5\n", "e\n")
    assert run(sandbox, "read a b; echo $((a * b)); exit 3", "bash", "6 7\n").stdout == "42\n"
    assert run(sandbox, "raise SystemExit(3)").code == 3
    failed = run(sandbox, "def f():\n    return 1 / 0\nf()")
    assert failed.code == 1
    assert 'main.py", line 2, in f' in failed.stderr
    assert "functions/sandbox" not in failed.stderr
    thread = "import threading\nt = threading.Thread(target=lambda: print('late'))\nt.start()"
    assert run(sandbox, thread + "\nimport atexit\natexit.register(lambda: print('last'))").stdout == "late\nlast\n"


def test_files_are_there_and_fresh_for_each_run(sandbox: LocalSandbox) -> None:
    code = "import os; print(open('in/a.txt').read(), sorted(os.listdir('/tmp'))); open('left', 'w').write('x')"
    program = Program(code, files={"in/a.txt": b"given"}, limits=TIGHT)
    assert [sandbox.run(program).stdout for _ in range(2)] == ["given ['in', 'main.py']\n"] * 2


def test_nothing_of_ours_is_seen(sandbox: LocalSandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    secret.chmod(0o644)
    code = f"""
import os, json
def tried(action):
    try:
        return str(action())
    except Exception as error:
        return type(error).__name__
print(json.dumps({{
    "proc": tried(lambda: os.listdir("/proc")),
    "secret": tried(lambda: open({str(secret)!r}).read()),
    "passwd": tried(lambda: open("/etc/passwd").read().count(":")),
    "shadow": tried(lambda: open("/etc/shadow").read()),
    "ours": tried(lambda: os.listdir({str(Path(__file__).parents[2])!r} + "/functions")),
    "environment": sorted(os.environ),
    "descriptors": [n for n in range(3, 64) if not tried(lambda: os.fstat(n)).startswith("OSError")],
    "kill": tried(lambda: os.kill(-1, 0)),
    "parents": [os.getpid(), os.getppid()],
    "uid": os.getuid(),
}}))"""
    seen = json.loads(run(sandbox, code).stdout)
    assert seen.pop("parents") == [2, 1]
    assert seen.pop("uid") != 0
    assert seen == {
        "proc": "[]", "secret": "FileNotFoundError", "passwd": "6", "shadow": "FileNotFoundError",
        "ours": "FileNotFoundError", "descriptors": [], "kill": "ProcessLookupError",
        "environment": ["HOME", "LANG", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PATH"],
    }  # fmt: skip


def test_no_network(sandbox: LocalSandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as unix:
        unix.bind("\0rlhf-sandbox-test")
        unix.listen()
        port = server.getsockname()[1]
        code = f"""
import socket
for family, address in ((socket.AF_INET, ("127.0.0.1", {port})), (socket.AF_INET, ("1.1.1.1", 53)),
                        (socket.AF_INET6, ("::1", {port})), (socket.AF_UNIX, "\\0rlhf-sandbox-test"),
                        (40, (2, 1024)), (socket.AF_NETLINK, (0, 0))):
    try:
        s = socket.socket(family, socket.SOCK_STREAM)
        s.connect(address)
        print("connected", address)
    except OSError:
        print("no")
"""
        assert run(sandbox, code).stdout.split() == ["no"] * 6


@pytest.mark.parametrize(
    "path", ["/usr/escaped", "/bin/escaped", "/escaped", "/etc/passwd", "/dev/escaped", f"{sys.prefix}/escaped",
             "/proc/escaped", f"{sys.base_prefix}/bin/python3"],
)  # fmt: skip
def test_the_root_is_read_only(sandbox: LocalSandbox, path: str) -> None:
    code = f"import os; os.chmod({path!r}, 0o777) if os.path.exists({path!r}) else None; open({path!r}, 'a').write('x')"
    result = run(sandbox, code)
    assert result.code == 1
    if Path(path).is_relative_to("/tmp"):  # a checkout below it: /tmp is the program's own, and empty
        assert "No such file or directory" in result.stderr
    else:
        assert "Read-only file system" in result.stderr or "Permission" in result.stderr
    assert not path.endswith("escaped") or not Path(path).exists()


def test_links_and_paths_lead_nowhere(sandbox: LocalSandbox) -> None:
    here = str(Path(__file__).resolve())
    result = run(sandbox, f"ln -s {here} a; cat a; ln -s / b; cat b/{here} ../../..{here}; ln /usr/bin/env c", "bash")
    assert "def test_links" not in result.stdout
    with pytest.raises(ValueError, match="below the program's folder"):
        Program("", files={"../x": b""})


SYSTEM_CALLS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(*a):
    return 0 if libc.syscall(*a) >= 0 else ctypes.get_errno()
NUMBERS = {"x86_64": (272, 101, 165, 425, 319, 161), "aarch64": (97, 117, 40, 425, 279, 51)}[os.uname().machine]
unshare, ptrace, mount, io_uring, memfd, chroot = NUMBERS
print(call(unshare, 0x10000000), call(ptrace, 0, 0, 0, 0), call(ptrace, 16, 1, 0, 0),
      call(mount, b"x", b"/tmp", b"tmpfs", 0, 0), call(io_uring, 1, ctypes.create_string_buffer(256)),
      call(memfd, b"x", 0), call(chroot, b"/tmp"),
      libc.setuid(0), libc.prctl(23, 21, 0, 0, 0))
"""


def test_no_new_namespaces_nor_rights_nor_other_processes_memory(sandbox: LocalSandbox) -> None:
    assert run(sandbox, SYSTEM_CALLS).stdout.split() == ["1"] * 7 + ["-1", "0"], "EPERM; no capability is left to hold"


ENDLESS = {
    "sleep": "import time; time.sleep(1000)",
    "loop": "while True: pass",
    "ignores TERM": """
import contextlib, signal
for n in range(1, 65):
    with contextlib.suppress(OSError, ValueError):
        signal.signal(n, signal.SIG_IGN)
while True: pass
""",
    "kills its parents": """
import contextlib, os, signal, time
for p in (os.getppid(), 1, -1):
    with contextlib.suppress(OSError):
        os.kill(p, signal.SIGKILL)
time.sleep(1000)
""",
    "stops its parents": "import os, signal, time\nos.kill(1, signal.SIGSTOP)\ntime.sleep(1000)",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "many that sleep": "import os, time\nfor _ in range(8): os.fork()\ntime.sleep(1000)",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_does_not_end_is_ended(sandbox: LocalSandbox, name: str) -> None:
    result = sandbox.run(Program(ENDLESS[name], limits=Limits(timeout_s=0.3, memory_mb=512, processes=16)))
    assert (result.status, result.code) in (("timeout", -9), ("finished", 1)), result


def test_nothing_outlives_it(sandbox: LocalSandbox) -> None:
    """A daemon: forked twice, in a session of its own, its streams closed. Known on the outside by its argument."""
    mark = f"outlives-{os.getpid()}"
    code = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for n in range(3): os.close(n)
        os.execv("/bin/sleep", ["{mark}", "1000"])
    os._exit(0)
os.wait()
time.sleep(0.2)
print("left")
"""
    assert run(sandbox, code).stdout == "left\n"
    assert not named(mark)


def named(mark: str) -> list[str]:
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [str(line)] if mark.encode() in line.read_bytes() else []
        except OSError:
            continue
    return found


def test_a_fork_bomb(sandbox: LocalSandbox) -> None:
    result = sandbox.run(Program(":(){ :|:& };:; sleep 1000", "bash", limits=Limits(timeout_s=1, processes=16)))
    assert result.status in ("timeout", "finished", "output", "memory")
    code = """
import errno, os
n = 0
while True:
    try:
        if os.fork() == 0:
            os.read(os.pipe()[0], 1)
    except OSError as error:
        print(n, error.errno == errno.EAGAIN)
        break
    n += 1
"""
    assert run(sandbox, code).stdout == "15 True\n"


def test_memory(sandbox: LocalSandbox) -> None:
    alone = run(sandbox, "x = bytearray(1 << 30)")
    assert (alone.status, alone.code) == ("finished", 1)
    assert "MemoryError" in alone.stderr
    together = run(sandbox, "import os, time\nfor _ in range(3): os.fork()\nx = b'x' * (60 << 20)\ntime.sleep(1000)")
    assert together.status == "memory"
    shared = run(sandbox, "import mmap, time\nm = mmap.mmap(-1, 1 << 29)")
    assert shared.code == 1


def test_disk(sandbox: LocalSandbox) -> None:
    for code in (
        "import os\nfor i in range(100):\n    with open(str(i), 'wb') as f: f.write(b'x' * (1 << 20))",
        "for i in range(100000): open(str(i), 'w').close()",
        "open('big', 'wb').truncate(1 << 40)",
        "open('/dev/shm/x', 'wb').write(bytes(1 << 25))",
    ):
        result = run(sandbox, code)
        assert result.status == "finished"
        assert result.code != 0


def test_huge_output(sandbox: LocalSandbox) -> None:
    for code in ("while True: print('x' * 1000)", "import sys\nwhile True: sys.stderr.write('x' * 1000)"):
        result = run(sandbox, code)
        assert result.status == "output"
        assert len(result.stdout) <= 64 << 10 >= len(result.stderr)
    assert run(sandbox, "import sys; sys.stdout.buffer.write(b'\\xff\\x00a')").stdout == "�\0a"


def test_closed_streams_and_a_changed_standard_input_harm_nobody(sandbox: LocalSandbox) -> None:
    result = run(sandbox, "import os\nos.close(1); os.close(2)\nos.write(0, b'x')", stdin="given")
    assert result.status == "finished"
    assert run(sandbox, "print(input())", stdin="given").stdout == "given\n"


def test_a_killed_fork_server_takes_its_runs_along_and_is_started_again() -> None:
    mark = f"abandoned-{os.getpid()}"
    with LocalSandbox() as sandbox, ThreadPoolExecutor() as pool:
        program = Program(f"exec -a {mark} sleep 1000", "bash", limits=Limits(timeout_s=60, memory_mb=64))
        first = pool.submit(sandbox._run, program)
        until(lambda: named(mark))
        sandbox._server.kill()
        assert isinstance(first.exception(), EOFError | ConnectionError)
        until(lambda: not named(mark))
        assert sandbox.run(Program("print(1)")).stdout == "1\n"


def test_a_caller_that_goes_takes_its_run_along(sandbox: LocalSandbox) -> None:
    mark = f"alone-{os.getpid()}"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(sandbox._control, [b"r"], [theirs.fileno()])
        _send(ours, {"code": f"exec -a {mark} sleep 1000", "language": "bash", "stdin": "", "files": {}, "limits": {}})
        until(lambda: named(mark))
    until(lambda: not named(mark))
