"""Tools of an MCP server over stdio; the server is the package's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from functions.call.function import FatalError
from functions.environment.base import Said
from functions.environment.kinds import open_kind

SERVER = '''
from mcp.server import MCPServer
server = MCPServer("shop")

@server.tool()
def price(item: str, count: int = 1) -> int:
    """Of an item."""
    return {"tea": 3}[item] * count

server.run()
'''


def test_a_server_over_stdio(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="the package mcp is not installed (an optional extra)")
    (tmp_path / "server.py").write_text(SERVER)
    kind = open_kind(f"mcp:{sys.executable} {tmp_path / 'server.py'}")
    (tool,) = kind.tools
    assert tool["function"]["name"] == "price"
    assert tool["function"]["parameters"]["properties"]["item"]["type"] == "string"
    episode = kind.episode()
    episode.begin({}, 0)
    call = '<tool_call>{"name": "price", "arguments": {"item": "%s", "count": 2}}</tool_call>'
    assert episode.act(Said(call % "tea")).observations == [("price", "6")]
    answer = episode.act(Said(call % "car"))
    assert answer.errors == {"raised": 1}
    assert answer.observations[0][1].startswith("Error: ")
    assert not episode.act(Said("6")).observations


def test_a_server_that_is_none() -> None:
    pytest.importorskip("mcp", reason="the package mcp is not installed (an optional extra)")
    with pytest.raises(FatalError, match=r"^mcp:/no/such/server does not answer: "):
        open_kind("mcp:/no/such/server")
