"""A connection to one MCP server. Needs the package `mcp`."""

from __future__ import annotations

import asyncio
import json
import os
import select
import threading
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from rl_core.errors import RLCoreError
from rl_envs.tools.config import McpServerConfig

_LONGEST_ERROR = 2_000
_LAST_LINES = 5
_CHUNK = 65_536
_CLOSE_S = 20.0
"""Time to close a connection in seconds; the client kills a process that ignores its signals after about 4."""


class ServerEndedError(RLCoreError):
    """The server did not start, or ended, or cannot be reached."""


class ToolError(Exception):
    """A tool returned an error, for the model to read."""


class McpConnection:
    """A connection, used in the event loop in which it was opened.

    Attributes:
        has_ended: Whether the connection has been closed, by either side.
    """

    def __init__(self, config: McpServerConfig) -> None:
        self._config = config
        self._stop = asyncio.Event()
        self._client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._errors = _LastErrors()
        self.has_ended = False

    @classmethod
    async def open(cls, config: McpServerConfig) -> McpConnection:
        """Start the server, or connect to it.

        Raises:
            ServerEndedError: It does not start or answer in time.
        """
        connection = cls(config)
        # The client must be closed by the task that opened it.
        connection._serving = asyncio.create_task(connection._serve())
        await connection._client
        return connection

    _serving: asyncio.Task[None]

    async def _serve(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self._config.start_timeout_s):
                    client = await stack.enter_async_context(await self._make_client(stack))
                self._client.set_result(client)
                await self._stop.wait()
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                self._client.cancel()
                raise
            if not self._client.done():
                self._client.set_exception(ServerEndedError(self._start_error(error)))
        finally:
            self.has_ended = True
            self._errors.close()

    async def _make_client(self, stack: AsyncExitStack) -> Any:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        config = self._config
        if config.url is not None:
            http = await stack.enter_async_context(create_mcp_http_client(headers=dict(config.headers)))
            return Client(streamable_http_client(config.url, http_client=http))
        command, *arguments = config.command
        server = StdioServerParameters(command=command, args=arguments, env=dict(config.env))
        return Client(stdio_client(server, errlog=self._errors.file))

    def _start_error(self, error: BaseException) -> str:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, TimeoutError):
            reason = f"no answer within {self._config.start_timeout_s:g} seconds"
        else:
            reason = f"{type(error).__name__}: {error}"
        return f"the server ({self._name}) did not start: {reason}{self._printed()}"

    @property
    def _name(self) -> str:
        return self._config.url or " ".join(self._config.command)

    def _printed(self) -> str:
        printed = self._errors.text()
        return f"; it printed: {printed}" if printed else ""

    async def list_tools(self) -> list[Any]:
        """The tools of the server.

        Raises:
            ServerEndedError: The server has ended, refuses, or has not listed all of them within `start_timeout_s`.
        """
        client = await self._client
        tools, cursor = [], None
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                while True:
                    page = await self._asked(client.list_tools(cursor=cursor))
                    tools += page.tools
                    cursor = page.next_cursor
                    if cursor is None:
                        return tools
        except TimeoutError:
            reason = f"not within {self._config.start_timeout_s:g} seconds"
        except ToolError as error:
            reason = str(error)
        raise ServerEndedError(f"the server ({self._name}) did not list its tools: {reason}{self._printed()}")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool; returns the result as text.

        Raises:
            ToolError: The tool or the server returned an error.
            ServerEndedError: The server has ended.
        """
        client = await self._client
        result = await self._asked(client.call_tool(name, dict(arguments)))
        text = _text(result)
        if result.is_error:
            raise ToolError(text)
        return text

    async def _asked(self, request: Any) -> Any:
        import anyio
        from mcp import MCPError

        try:
            return await request
        except MCPError as error:
            if error.message != "Connection closed":
                raise ToolError(str(error)) from error
            reason = "it closed the connection"
        except (OSError, anyio.ClosedResourceError, anyio.BrokenResourceError) as error:
            reason = f"{type(error).__name__}: {error}"
        self.has_ended = True
        raise ServerEndedError(f"the server ended: {reason}{self._printed()}")

    async def close(self) -> None:
        """Close the connection; a process is ended. A connection that does not close in time is abandoned."""
        self._stop.set()
        await asyncio.wait([self._serving], timeout=_CLOSE_S)
        self._serving.cancel()


def _text(result: Any) -> str:
    """What the model reads of a result: its texts; content of other types is only named."""
    texts = [getattr(block, "text", None) or f"({block.type} content is not shown)" for block in result.content]
    if not texts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(texts)


class _LastErrors:
    """Reads a process's stderr, so that it never blocks, and keeps the end of it for errors.

    Attributes:
        file: For the process to write to.
    """

    def __init__(self) -> None:
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)
        self.file = os.fdopen(writer, "w")
        self._kept = b""
        self._has_ended = False
        self._turn = threading.Lock()
        threading.Thread(target=self._read, name="stderr of an MCP server", daemon=True).start()

    def _read(self) -> None:
        written = select.poll()
        written.register(self._reader, select.POLLIN)
        while not self._has_ended:
            written.poll()
            self._drain()
        os.close(self._reader)

    def _drain(self) -> None:
        """Keep the end of what has been written so far."""
        with self._turn:
            while not self._has_ended:
                try:
                    chunk = os.read(self._reader, _CHUNK)
                except BlockingIOError:
                    return
                self._has_ended = not chunk
                self._kept = (self._kept + chunk)[-_LONGEST_ERROR:]

    def text(self) -> str:
        """The last lines that have been written so far."""
        self._drain()
        lines = [line.strip() for line in self._kept.decode(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-_LAST_LINES:])

    def close(self) -> None:
        """End the reading once the process has ended as well."""
        self.file.close()
