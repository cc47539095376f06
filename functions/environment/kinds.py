"""Which environments there are, by how a job names them.

file.py:Class, package.module:Class     one's own, or TRL's (own.py)
mcp:COMMAND, mcp:http://...             the tools of an MCP server (mcp.py)
sandbox:local, sandbox:http://...       tools python and bash in a sandbox (sandbox.py)
verifiers:TASKSET                       a taskset of verifiers (verifiers.py)
openenv:http://...                      an OpenEnv server (openenv.py)
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

from functions.base.wire import Json
from functions.environment.base import Answer, Said
from functions.environment.own import OwnKind


class Episode(Protocol):
    """One episode, from one thread at a time. Any method may raise, and may take long."""

    stateless: bool
    """Answers do not depend on earlier ones: nothing of it is to be kept, or made again."""

    def begin(self, row: Mapping[str, Any], seed: int) -> None: ...

    def act(self, said: Said | None) -> Answer:
        """What follows an assistant's turn; None: what comes before the first (of a kind that `asks`)."""

    def reward(self, said: Said) -> float | None:
        """Of the whole episode, its turns' rewards included; None: their sum. `said`: its last turn."""

    @property
    def restores(self) -> bool:
        """Whether it has `state` and `restore`."""

    def state(self) -> Any:
        """JSON; asked for after a turn."""

    def restore(self, state: Any) -> None:
        """After `begin`."""

    def close(self) -> None: ...


class Kind(Protocol):
    """Makes episodes. `tools`: what the chat template is given; none: its turns are texts."""

    name: str
    tools: Sequence[Json]
    asks: bool
    """Its episodes make their prompts themselves, before the first turn (harness.py)."""

    def episode(self) -> Episode: ...


_SCHEMES = {"mcp": "McpKind", "sandbox": "SandboxKind", "verifiers": "VerifiersKind", "openenv": "OpenEnvKind"}
"""By the module of each, which is loaded where it is asked for."""


def open_kind(name: str) -> Kind:
    """Raises FatalError, in one line, for what is none."""
    scheme, _, rest = name.partition(":")
    if scheme not in _SCHEMES:
        return OwnKind(name)
    kind: Kind = getattr(import_module(f"functions.environment.{scheme}"), _SCHEMES[scheme])(rest)
    return kind


def role(kind: Kind) -> str:
    """Of its observations in the chat template."""
    return "tool" if kind.tools else "user"
