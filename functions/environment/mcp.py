"""The tools of an MCP server (Model Context Protocol) as an environment: `mcp:COMMAND` over stdio, `mcp:http://...`.

One connection for each replica, shared by its episodes: what a tool answers does not depend on an episode's earlier
calls. The server that a command starts gets no secrets of ours (the package passes on PATH, HOME and the like), and
ends with the replica. Episodes are scored by the job's scorer. Wants the package mcp, 2.0 or newer.
"""

import asyncio
import shlex
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

from functions.base.wire import Json
from functions.call.function import FatalError
from functions.environment.own import ToolsEpisode
from functions.environment.parse import ToolCall

OPENED_S = 60.0


class McpKind:
    """Raises FatalError, in one line, for a server that does not answer."""

    asks = False

    def __init__(self, server: str) -> None:
        try:
            from mcp import Client, StdioServerParameters
        except ImportError as error:
            raise FatalError(f"mcp:{server} wants the package mcp, 2.0 or newer (pip install 'mcp>=2')") from error
        self.name = f"mcp:{server}"
        words = [server] if server.startswith(("http://", "https://")) else shlex.split(server)
        if not words:
            raise FatalError("mcp: names no server; wants mcp:COMMAND or mcp:http://...")
        remote = words[0].startswith(("http://", "https://"))
        self._client = Client(words[0] if remote else StdioServerParameters(command=words[0], args=words[1:]))
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True).start()
        opened: Future[None] = Future()
        asyncio.run_coroutine_threadsafe(self._stay(opened), self._loop)
        try:
            opened.result(OPENED_S)
            listed: Any = self.run(self._client.list_tools())
        except Exception as error:
            reason = _innermost(error)
            raise FatalError(f"{self.name} does not answer: {type(reason).__name__}: {reason}") from error
        self.tools: Sequence[Json] = [_schema(tool) for tool in listed.tools]
        if not self.tools:
            raise FatalError(f"{self.name} has no tools")

    async def _stay(self, opened: Future[None]) -> None:
        """Holds the connection open, in the task that opened it."""
        try:
            async with self._client:
                opened.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:
            if not opened.done():
                opened.set_exception(error)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def use(self, call: ToolCall) -> str:
        result: Any = self.run(self._client.call_tool(call.name, dict(call.arguments)))
        text = "\n".join(part.text for part in result.content if getattr(part, "text", None) is not None)
        if result.is_error:
            raise RuntimeError(text)
        return text

    def episode(self) -> ToolsEpisode:
        return ToolsEpisode(self.tools, self.use)


def _schema(tool: Any) -> Json:
    told = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": told}


def _innermost(error: BaseException) -> BaseException:
    """Of an exception group, the first that is none."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
