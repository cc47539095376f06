"""Tools `python` and `bash` in a sandbox: `sandbox:local`, or `sandbox:http://...`, a service in SandboxFusion's form.

Each call is a program of its own, in a sandbox of its own (docs/sandbox.md): what one wrote, the next does not find.
Episodes are scored by the job's scorer. A sandbox that fails is an environment that failed, not an answer.
"""

from collections.abc import Sequence

from functions.base.wire import Json
from functions.call.function import FatalError
from functions.environment.base import EnvironmentFailed
from functions.environment.own import ToolsEpisode
from functions.environment.parse import ToolCall
from functions.environment.schema import schema
from functions.sandbox.local import open_sandbox
from functions.sandbox.program import Limits, Program, SandboxError

LIMITS = Limits()
LONGEST = 4096
"""Characters of an answer: its beginning and its end, where it is longer."""


def python(code: str) -> None:
    """Runs a Python program; answers what it prints.

    Args:
        code: The whole program. Nothing is left of earlier ones.
    """


def bash(command: str) -> None:
    """Runs a shell script; answers what it prints.

    Args:
        command: The whole script. Nothing is left of earlier ones.
    """


class SandboxKind:
    """Raises FatalError, in one line, where there is no sandbox."""

    asks = False

    def __init__(self, where: str) -> None:
        if where != "local" and not where.startswith(("http://", "https://")):
            raise FatalError(f"sandbox:{where} wants sandbox:local or sandbox:http://...")
        self.name = f"sandbox:{where}"
        self.tools: Sequence[Json] = [schema("python", python), schema("bash", bash)]
        try:
            self.sandbox = open_sandbox(None if where == "local" else where)
        except SandboxError as error:
            raise FatalError(f"{self.name}: {error}") from error

    def episode(self) -> ToolsEpisode:
        return ToolsEpisode(self.tools, self.use)

    def use(self, call: ToolCall) -> str:
        code = str(call.arguments["code" if call.name == "python" else "command"])
        try:
            result = self.sandbox.run(Program(code, "python" if call.name == "python" else "bash", limits=LIMITS))
        except SandboxError as error:
            raise EnvironmentFailed(f"{self.name}: {error}") from error
        text = result.stdout + result.stderr
        if len(text) > LONGEST:
            text = f"{text[: LONGEST // 2]}\n[{len(text) - LONGEST} characters]\n{text[-(LONGEST // 2) :]}"
        if result.status != "finished":
            return f"{text}\n[ended: {result.status} limit]".lstrip()
        return text if result.ok else f"{text}\n[exit status {result.code}]".lstrip()
