"""[environment]: what answers the policy's turns, and how a job names it."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from orchestrator.base.section import Section

SCHEMES = ("mcp:", "sandbox:", "verifiers:", "openenv:")
"""Of environments that are no file's (functions/environment/kinds.py)."""


class EnvironmentConfig(Section):
    """What answers the policy's turns (docs/environments.md)."""

    kind: str | Mapping[str, str]
    """`<file.py>:<Class>`, `mcp:<command or URL>`, `sandbox:local`, `verifiers:<taskset>`, `openenv:<URL>`; or several
    by name: a row's column `environment` says which is its own."""
    max_turns: int = Field(8, ge=1)
    """Turns of one episode, at most."""
    timeout_s: float = Field(60.0, gt=0)
    """For each thing that is asked of an environment: a tool call, a step, a reset, a reward."""
    concurrency: int = Field(16, ge=1)
    """Episodes that one replica serves at a time."""

    @property
    def kinds(self) -> Mapping[str, str]:
        """By the name that rows have for them; "": all rows."""
        return {"": self.kind} if isinstance(self.kind, str) else self.kind


def environment_of(row: Mapping[str, Any], config: EnvironmentConfig | None) -> str:
    """The name of the environment that a row is for; "": the job's only one."""
    return "" if config is None or "" in config.kinds else str(row.get("environment"))
