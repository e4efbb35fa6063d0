"""Tools of MCP servers (Model Context Protocol), which run in their own processes or behind a URL."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from pydantic import TypeAdapter

from rl_core.errors import ConfigError
from rl_core.event_loop import EventLoopThread
from rl_core.interfaces.messages import ToolSpec
from rl_core.plugins.component import did_you_mean
from rl_core.tools.runner import ToolUnavailableError, current_session
from rl_core.tools.specs import Tool, ToolArgumentError, readable_schema
from rl_envs.tools.config import McpServerConfig
from rl_envs.tools.mcp_connection import McpConnection, ServerEndedError

ResultT = TypeVar("ResultT")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ARGUMENTS: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])


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
