"""Tools of MCP servers (Model Context Protocol), which run in their own processes or behind a URL. Needs the package `mcp`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from pydantic import TypeAdapter

from rl_core.errors import ConfigError, RLCoreError
from rl_core.event_loop import EventLoopThread
from rl_core.interfaces.records import ToolSpec
from rl_core.plugins.component import did_you_mean
from rl_core.tools.runner import ToolUnavailableError, current_session
from rl_core.tools.specs import Tool, ToolArgumentError, readable_schema
from rl_envs.config import McpServerConfig

ResultT = TypeVar("ResultT")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ARGUMENTS: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])
_LONGEST_ERROR = 2_000
_LAST_LINES = 5
_CHUNK = 65_536
_CLOSE_S = 20.0
"""Time to close a connection in seconds; the client kills a process that ignores its signals after about 4."""


def list_servers(configs: Mapping[str, McpServerConfig]) -> list[McpServer]:
    """The servers of a config, not started.

    Raises:
        ConfigError: The package `mcp` is not installed.
    """
    if not configs:
        return []
    try:
        import jsonschema  # noqa: F401
        import mcp  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"mcp_servers needs the package mcp ({error}): pip install 'rl-envs[mcp]'.") from error
    return [McpServer(name, config) for name, config in configs.items()]


def add_tools(tools: dict[str, Tool], more: Mapping[str, Tool]) -> None:
    """Add the tools of a server.

    Raises:
        ConfigError: A name is taken.
    """
    for name, tool in more.items():
        if name in tools:
            raise ConfigError(
                f"mcp_servers: the environment has two tools with the name {name!r}: select others with the server's `tools`."
            )
        tools[name] = tool


class McpServer:
    """A server with its connections: one for all rollouts, or one for each.

    A server that ends makes the rows of its open calls unscored; the next call starts it again.

    Args:
        name: Its name in the config.
        config: How to reach it.
    """

    def __init__(self, name: str, config: McpServerConfig) -> None:
        self._name, self._config = name, config
        self._loop = EventLoopThread(f"mcp {name}")
        self._connections: dict[str | None, asyncio.Task[McpConnection]] = {}
        self._is_closed = False

    def start(self) -> dict[str, Tool]:
        """Connect, and return the tools by name.

        Raises:
            ConfigError: It does not start, or a tool is missing or cannot be offered.
        """
        try:
            listed = self._loop.run(self._list())
        except ServerEndedError as error:
            raise ConfigError(f"mcp_servers.{self._name}: {error}") from error
        wanted = list(listed) if self._config.tools is None else self._config.tools
        for name in wanted:
            if name not in listed:
                hint = did_you_mean(name, list(listed))
                raise ConfigError(
                    f"mcp_servers.{self._name}.tools: the server has no tool {name!r}.{hint} It has: {', '.join(listed)}."
                )
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"mcp_servers.{self._name}: the name of the tool {name!r} cannot be used, because models call names of "
                    "letters, digits, `_` and `-`: list the tools to use in `tools` without it."
                )
        return {name: self._tool(listed[name]) for name in wanted}

    async def _list(self) -> dict[str, Any]:
        connection = await self._connected(None)
        tools = await connection.list_tools()
        if self._config.per_rollout:
            await self._end(None)
        return {tool.name: tool for tool in tools}

    def _tool(self, listed: Any) -> Tool:
        try:
            parameters = readable_schema(listed.input_schema)
        except KeyError as error:  # a reference to another document
            raise ConfigError(
                f"mcp_servers.{self._name}: the schema of the tool {listed.name!r} has a reference that cannot be read "
                f"({error}): list the tools to use in `tools` without it."
            ) from error
        spec: ToolSpec = {
            "type": "function",
            "function": {"name": listed.name, "description": listed.description or "", "parameters": parameters},
        }
        return McpTool(spec=spec, function=self._function(listed.name), adapter=_ARGUMENTS)

    def _function(self, name: str) -> Callable[..., Any]:
        async def call(**arguments: Any) -> str:
            session = current_session() if self._config.per_rollout else None
            try:
                connection = await self._in_loop(self._connected(session))
            except asyncio.CancelledError:
                # The timeout of the call, which is the start's fault and not the model's.
                raise self._unavailable("it did not start within the timeout of the call") from None
            except ServerEndedError as error:
                raise self._unavailable(str(error)) from error
            try:
                return await self._in_loop(connection.call(name, arguments))
            except ServerEndedError as error:
                await self._in_loop(self._end(session))
                raise self._unavailable(str(error)) from error

        return call

    async def _in_loop(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        return await asyncio.wrap_future(self._loop.start(coroutine))

    def _unavailable(self, reason: str) -> ToolUnavailableError:
        return ToolUnavailableError(f"the MCP server {self._name!r} does not work: {reason}")

    async def _connected(self, session: str | None) -> McpConnection:
        """The connection of a rollout, or the one of all; opened if there is none that works."""
        opening = self._connections.get(session)
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception() or opening.result().has_ended)):
            opening = self._connections[session] = asyncio.create_task(McpConnection.open(self._config))
        return await asyncio.shield(opening)  # a call that times out leaves the start to the others

    async def _end(self, session: str | None) -> None:
        opening = self._connections.pop(session, None)
        if opening is None:
            return
        try:
            connection = await opening
        except ServerEndedError:
            return
        await connection.close()

    def end(self, session: str) -> None:
        """End the connection of a rollout, if it has one."""
        if session in self._connections:
            self._loop.run(self._end(session))

    def close(self) -> None:
        """End all connections and the processes of the server; calling it twice is fine."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.run(self._end_all())
            self._loop.close()

    async def _end_all(self) -> None:
        await asyncio.gather(*(self._end(session) for session in list(self._connections)))


class McpTool(Tool):
    """A tool of a server. Arguments must match its schema; they are not converted."""

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, checked against the JSON schema of the server."""
        import jsonschema

        errors = jsonschema.Draft202012Validator(self.spec["function"]["parameters"]).iter_errors(dict(arguments))
        problems = [f"{error.json_path.removeprefix('$').lstrip('.') or 'arguments'}: {error.message}" for error in errors]
        if problems:
            raise ToolArgumentError("; ".join(problems))
        return dict(arguments)


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
    """What the model reads of a result: its texts; content of other types is only named.

    A list is JSON, as the result of a function is: servers of the Python package send its elements as separate texts, so
    that "a" and ["a"] have the same content, and [] and None have none.
    """
    value = result.structured_content
    if isinstance(value, dict) and value.keys() == {"result"}:
        value = value["result"]
    if isinstance(value, list) or (not result.content and result.structured_content is not None):
        return json.dumps(value, ensure_ascii=False)
    return "\n".join(getattr(block, "text", None) or f"({block.type} content is not shown)" for block in result.content)


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
