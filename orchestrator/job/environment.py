"""A job's environments, looked at before anything runs: whether they open, which tools they have, and whether the
model's chat template takes them.

They are opened in a process of their own: user code may import what it likes, and the orchestrator imports no torch.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from functions.base.chat import Chat
from functions.base.turns import Turns, check_tools, stops
from functions.base.wire import Json
from orchestrator.base.errors import ConfigError
from orchestrator.job.config import JobConfig
from orchestrator.job.data import Row

OPENED_S = 120.0
Tools = Mapping[str, Sequence[Json]]
"""Schemas of each environment's tools, by the name that rows have for it."""


def environment_tools(job: JobConfig, chat: Chat) -> tuple[Tools, bool]:
    """And whether one of them makes its prompts itself, a harness. Raises ConfigError, in one line, for an environment
    that does not open or a chat template that cannot have it."""
    assert job.environment is not None, "the job has one"
    if not chat.has_template:
        raise ConfigError(f"model.path: {job.model.path} has no chat template; an [environment] wants one")
    said = _opened(job.environment.kinds)
    tools: Tools = said["tools"]
    try:
        for name, schemas in tools.items():
            ends = stops(Path(job.model.path), chat)
            if name not in said["ask"]:  # what a harness says in which role shows when it does
                Turns(chat, ends, "tool" if schemas else "user")
            check_tools(chat, schemas)
    except ValueError as error:
        raise ConfigError(f"model.path: {error}") from error
    return tools, bool(said["ask"])


def tools_of(row: Row, tools: Tools) -> Sequence[Json] | None:
    """Raises ValueError for a row whose column `environment` names none."""
    name = "" if "" in tools else row.columns.get("environment")
    if not isinstance(name, str) or name not in tools:
        raise ValueError(f"field 'environment' is {name!r}; the job has {', '.join(tools)}")
    return tools[name] or None


def _opened(kinds: Mapping[str, str]) -> Json:
    command = [sys.executable, "-m", "functions.environment.describe", json.dumps(dict(kinds))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=OPENED_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"environment.kind: was not opened within {OPENED_S:g} s") from None
    lines = done.stdout.splitlines() or [""]
    try:
        said: Json = json.loads(lines[-1])
    except ValueError:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ConfigError(f"environment.kind: does not open: {last}") from None
    if "error" in said:
        raise ConfigError(f"environment.kind: {said['error']}")
    return said
