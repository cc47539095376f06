"""Tools `python` and `bash` as the model meets them."""

from __future__ import annotations

import json
from contextlib import closing

import pytest

from functions.call.function import FatalError
from functions.environment.base import Said
from functions.environment.kinds import open_kind
from functions.environment.sandbox import LONGEST, SandboxKind


def call(name: str, **arguments: object) -> Said:
    return Said(f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>")


def test_programs_answer() -> None:
    try:
        kind = SandboxKind("local")
    except FatalError as error:
        pytest.skip(f"this machine allows no sandbox: {error}")
    with closing(kind.sandbox):
        answers(kind)


def answers(kind: SandboxKind) -> None:
    assert [tool["function"]["name"] for tool in kind.tools] == ["python", "bash"]
    episode = kind.episode()

    def answer(name: str, **arguments: object) -> str:
        [(told, text)] = episode.act(call(name, **arguments)).observations
        assert told == name
        return text

    assert answer("python", code="print(6 * 7)") == "42\n"
    assert answer("bash", command="echo a > f; cat f; exit 3") == "a\n\n[exit status 3]"
    assert answer("bash", command="cat f").endswith("[exit status 1]"), "fresh each time"
    assert answer("python", code="1 / 0").endswith("ZeroDivisionError: division by zero\n\n[exit status 1]")
    long = answer("python", code="print('x' * 9999)")
    assert len(long) < LONGEST + 40
    assert "[5904 characters]" in long
    assert answer("python", script="1").startswith("Error: argument 'code' is missing")
    assert not episode.act(Said("done")).observations


def test_where_there_is_none() -> None:
    with pytest.raises(FatalError, match="wants sandbox:local or sandbox:http"):
        open_kind("sandbox:here")
