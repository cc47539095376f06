"""The sandbox as one uses it: here, as an ordinary user, where it is not allowed, over HTTP; it leaks nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from functions.sandbox.local import LocalSandbox
from functions.sandbox.program import Limits, Program, SandboxError
from functions.sandbox.remote import ATTEMPTS, RemoteSandbox
from functions.sandbox.server import Most, app
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]


def held(sandbox: LocalSandbox) -> dict[str, int]:
    server = Path(f"/proc/{sandbox._server.pid}")
    return {
        "our descriptors": len(os.listdir("/proc/self/fd")),
        "its descriptors": len(os.listdir(server / "fd")),
        "its mounts": len((server / "mountinfo").read_text().splitlines()),
        "its processes": len((server / f"task/{server.name}/children").read_text().split()),
        "its resident pages": int((server / "statm").read_text().split()[1]),
    }


def leaks_nothing(sandbox: LocalSandbox, runs: int) -> None:
    for _ in range(3):
        sandbox.run(Program("print(1)"))
    until(lambda: held(sandbox)["its processes"] == 0)
    before = held(sandbox)
    with ThreadPoolExecutor(2) as pool:
        programs = [Program(f"open('x', 'w').write('x'); print({i})") for i in range(runs)]
        assert [r.stdout for r in pool.map(sandbox.run, programs)] == [f"{i}\n" for i in range(runs)]
    until(lambda: held(sandbox)["its processes"] == 0)
    after = held(sandbox)
    grown = after.pop("its resident pages") - before.pop("its resident pages")
    assert grown * os.sysconf("SC_PAGESIZE") <= runs * 100
    assert after == before


def test_runs_leave_nothing(sandbox: LocalSandbox) -> None:
    leaks_nothing(sandbox, 20)


@pytest.mark.slow
def test_a_thousand_runs_leave_nothing(sandbox: LocalSandbox) -> None:
    leaks_nothing(sandbox, 1000)


AS_OTHERS = """
import sys
sys.path.insert(0, {root!r})
from functions.sandbox.local import Limits, LocalSandbox, Program, SandboxError, check_here
try:
    check_here()
    with LocalSandbox() as sandbox:
        print(sandbox.run(Program("import os; print(os.getuid(), os.listdir('/proc'))")).stdout, end="")
        print(sandbox.run(Program("open('/usr/x', 'w')")).code)
        print(sandbox.run(Program("while True: pass", limits=Limits(timeout_s=0.2))).status)
except SandboxError as error:
    print(error)
"""


@pytest.fixture
def user(sandbox: LocalSandbox) -> list[str]:
    """The beginning of a command line: Python as an ordinary user."""
    if os.geteuid() != 0:
        return [sys.executable]
    command = ["setpriv", "--reuid=1234", "--regid=1234", "--clear-groups", "/usr/bin/python3"]
    check = f"import sys; sys.path[0] = {str(ROOT)!r}; import functions.sandbox.local"
    found = subprocess.run([*command, "-c", check], capture_output=True, check=False, cwd="/")
    if found.returncode != 0:
        pytest.skip(f"user 1234 has no Python here that reads this checkout: {found.stderr.decode()[-200:]}")
    return command


def said(command: list[str]) -> str:
    code = AS_OTHERS.format(root=str(ROOT))
    return subprocess.run([*command, "-c", code], stdout=subprocess.PIPE, text=True, check=True, cwd="/").stdout


def test_an_ordinary_user_has_the_same_sandbox(user: list[str]) -> None:
    assert said(user) == "1000 []\n1\ntimeout\n"


def test_a_machine_that_allows_none_is_named_in_one_line(user: list[str]) -> None:
    *become, python = user
    forbidden = ["unshare", "-Ur", "sh", "-c", 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"', "sh", python]
    [line] = said([*become, *forbidden]).splitlines()
    assert "this machine does not let a process make a user namespace" in line


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Limits(timeout_s=0), "timeout_s is 0, wants a number of seconds above 0"),
        (lambda: Limits(memory_mb=0), "memory_mb is 0, wants 1 or more"),
        (lambda: Program("", "ruby"), "language is 'ruby', wants one of python, bash"),  # type: ignore[arg-type]
        (lambda: Program("", files={"/etc/x": b""}), "file '/etc/x': wants a path below the program's folder"),
    ],
)
def test_bad_input(wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()


# --- over HTTP -------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_the_service_speaks_sandbox_fusions_form(sandbox: LocalSandbox) -> None:
    """Requests and answers as bytedance/SandboxFusion's own client has them."""
    transport = httpx.ASGITransport(app(sandbox, Most(2, memory_mb=256, timeout_s=1)))
    async with httpx.AsyncClient(transport=transport, base_url="http://sandbox") as client:

        async def ask(**body: Any) -> Any:
            return (await client.post("/run_code", json=body)).json()

        answer = await ask(code="print(input())", language="python", stdin="hi", run_timeout=10, compile_timeout=10)
        assert (answer["status"], answer["run_result"]["stdout"]) == ("Success", "hi\n")
        assert (answer["run_result"]["status"], answer["run_result"]["return_code"]) == ("Finished", 0)
        failed = await ask(code="exit 3", language="bash")
        assert (failed["status"], failed["run_result"]["return_code"]) == ("Failed", 3)
        late = await ask(code="while True: pass", language="python", run_timeout=100)
        assert (late["status"], late["run_result"]["status"]) == ("Failed", "TimeLimitExceeded")
        named = await ask(code="print(open('a').read())", language="python", files={"a": "Yg=="}, memory_limit_MB=10**6)
        assert named["run_result"]["stdout"] == "b\n"
        for body in ({"code": "x", "language": "ruby"}, {"language": "python"}, {"code": "", "language": "python",
                     "files": {"a": "?"}}, {"code": "", "language": "python", "run_timeout": 0}):  # fmt: skip
            assert (await client.post("/run_code", json=body)).status_code == 422


class Service(ThreadingHTTPServer):
    """Answers in turn, the last one for ever."""

    def __init__(self, *answers: tuple[int, Any]) -> None:
        self.answers, self.asked = list(answers), list[Any]()
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        service = self.server
        assert isinstance(service, Service)
        service.asked.append((self.path, json.loads(self.rfile.read(int(self.headers["content-length"])))))
        status, body = service.answers.pop(0) if len(service.answers) > 1 else service.answers[0]
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def ran(status: str = "Finished", code: int | None = 0, stdout: str = "") -> dict[str, Any]:
    return {"status": status, "return_code": code, "stdout": stdout, "stderr": "", "execution_time": 0.1}


def test_a_service_that_is_away_is_asked_again() -> None:
    broken = {"status": "SandboxError", "message": "no room"}
    with Service((504, {}), (200, broken), (200, {"status": "Success", "run_result": ran(stdout="5\n")})) as service:
        result = RemoteSandbox(service.url, pause_s=0).run(Program("print(5)", limits=Limits(timeout_s=2)))
        assert (result.ok, result.stdout) == (True, "5\n")
        path, body = service.asked[-1]
        assert (path, body["code"], body["language"], body["run_timeout"]) == ("/run_code", "print(5)", "python", 2)
        service.shutdown()


@pytest.mark.parametrize(
    ("answer", "status", "code"),
    [
        ({"status": "Failed", "run_result": ran("TimeLimitExceeded", None)}, "timeout", -9),
        ({"status": "Failed", "run_result": ran(code=2)}, "finished", 2),
        ({"status": "Failed", "compile_result": ran(code=1), "run_result": None}, "finished", 1),
    ],
)
def test_a_program_that_fails_there_is_a_result(answer: Any, status: str, code: int) -> None:
    with Service((200, answer)) as service:
        result = RemoteSandbox(f"{service.url}/faas/run_code").run(Program(""))
        assert (result.status, result.code) == (status, code)
        assert service.asked[0][0] == "/faas/run_code"
        service.shutdown()


@pytest.mark.parametrize(
    ("answer", "message", "asked"),
    [
        ((200, {"status": "SandboxError", "message": "no room"}), "failed 4 times: no room", ATTEMPTS),
        ((503, {}), "failed 4 times: it answered 503", ATTEMPTS),
        ((404, {"detail": "Not Found"}), "answered 404", 1),
        ((200, {"hello": 1}), "is it SandboxFusion's", 1),
    ],
)
def test_a_service_that_fails_is_no_result(answer: Any, message: str, asked: int) -> None:
    with Service(answer) as service:
        with pytest.raises(SandboxError, match=message):
            RemoteSandbox(service.url, pause_s=0).run(Program(""))
        assert len(service.asked) == asked
        service.shutdown()
    with pytest.raises(SandboxError, match="does not answer"):
        RemoteSandbox(service.url, pause_s=0).run(Program(""))
