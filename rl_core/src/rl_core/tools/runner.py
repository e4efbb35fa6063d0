"""Runs the tool calls of a batch concurrently, each with a timeout; a call that fails gives an error for the model to read."""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from pydantic_core import to_json

from rl_core.errors import RLCoreError
from rl_core.event_loop import in_thread
from rl_core.interfaces.records import Message, ToolCall
from rl_core.tools.specs import Tool, ToolArgumentError

_SESSION: ContextVar[str | None] = ContextVar("tool_session", default=None)


def current_session() -> str | None:
    """`session_id` of the rollout whose call this tool runs; None if the environment keeps no sessions."""
    return _SESSION.get()


class ToolUnavailableError(RLCoreError):
    """Raised by a tool that cannot run for a reason that is not the model's, such as a dead service: the row fails."""


class CallProblem(StrEnum):
    """Why a call is invalid."""

    MALFORMED = "malformed"
    """The call cannot be parsed, for example because its arguments are not valid JSON."""
    UNKNOWN_TOOL = "unknown_tool"
    WRONG_ARGUMENTS = "wrong_arguments"
    EXCEPTION = "exception"
    TIMEOUT = "timeout"


@dataclass(frozen=True, kw_only=True)
class CallResult:
    """What the model reads for a call.

    Attributes:
        content: The value as text, or the error.
        problem: Why the call is invalid; None for a valid one.
        is_unavailable: Whether the tool raised `ToolUnavailableError`.
        raised: Type and line of another exception that the tool raised, such as `TypeError at my_tools.py:3`; else empty.
    """

    content: str
    problem: CallProblem | None = None
    is_unavailable: bool = False
    raised: str = ""

    def message(self, call: ToolCall) -> Message:
        """The result as a message."""
        message = Message(role="tool", content=self.content)
        if "id" in call:
            message["tool_call_id"] = call["id"]
        if call["function"]["name"]:
            message["name"] = call["function"]["name"]
        return message


@dataclass(frozen=True, kw_only=True)
class CallRunner:
    """Runs calls of tools.

    A plain function runs in a thread. When its timeout expires, the model reads an error and the thread is left behind, because
    Python cannot stop it; an async function is cancelled.

    Attributes:
        tools: The tools, by name.
        timeout_s: Timeout of a call in seconds, from its start.
        max_concurrent: Number of calls that run at the same time.
        max_chars: Longest content; a longer result is cut, and its length is appended.
        total_s: Limit of all calls of a `run` together in seconds. Calls that have not ended then time out, so that many calls
            in one message are the model's mistake and not a timeout of the environment.
    """

    tools: Mapping[str, Tool]
    timeout_s: float
    max_concurrent: int
    max_chars: int
    total_s: float = math.inf

    def run(self, calls: Sequence[ToolCall], sessions: Sequence[str | None] | None = None) -> list[CallResult]:
        """Run the calls and return their results in the same order; no call raises.

        Args:
            calls: Calls of one or more rollouts.
            sessions: The `session_id` of each call's rollout, for `current_session`.
        """
        if not calls:
            return []
        with ThreadPoolExecutor(1) as own:  # the caller's thread may already run an event loop
            return own.submit(asyncio.run, self._run(calls, sessions or [None] * len(calls))).result()

    async def _run(self, calls: Sequence[ToolCall], sessions: Sequence[str | None]) -> list[CallResult]:
        free, end = asyncio.Semaphore(self.max_concurrent), asyncio.get_running_loop().time() + self.total_s

        async def one(call: ToolCall, session: str | None) -> CallResult:
            async with free:
                _SESSION.set(session)  # of this task only: each has its own context
                return await self._result(call, left_s=end - asyncio.get_running_loop().time())

        return list(await asyncio.gather(*map(one, calls, sessions)))

    async def _result(self, call: ToolCall, *, left_s: float) -> CallResult:
        name = call["function"]["name"]
        if "error" in call:
            return CallResult(content=f"Error: {call['error']}", problem=CallProblem.MALFORMED)
        tool = self.tools.get(name)
        if tool is None:
            known = f"Available tools: {', '.join(self.tools)}."
            return CallResult(content=f"Error: there is no tool {name!r}. {known}", problem=CallProblem.UNKNOWN_TOOL)
        try:
            arguments = tool.read(call["function"]["arguments"])
        except ToolArgumentError as error:
            text = f"Error: wrong arguments of {name}: {error}"
            return CallResult(content=self._cut(text), problem=CallProblem.WRONG_ARGUMENTS)
        try:
            value, raised = await asyncio.wait_for(_outcome(tool, arguments), min(self.timeout_s, left_s))
        except TimeoutError:
            text = f"Error: {name} did not finish within {self.timeout_s:g} seconds"
            if left_s < self.timeout_s:
                text = f"Error: {name} did not finish, because the calls together took more than {self.total_s:g} seconds"
            return CallResult(content=text, problem=CallProblem.TIMEOUT)
        if isinstance(raised, ToolUnavailableError):
            return CallResult(content=self._cut(_readable(f"Error: {raised}")), is_unavailable=True)
        if raised is not None:
            text = f"Error: {type(raised).__name__}: {raised}"
            raised_at = _location(raised, tool)
            return CallResult(content=self._cut(_readable(text)), problem=CallProblem.EXCEPTION, raised=raised_at)
        text = value if isinstance(value, str) else to_json(value, fallback=str, inf_nan_mode="constants").decode()
        return CallResult(content=self._cut(_readable(text)))

    def _cut(self, text: str) -> str:
        if len(text) <= self.max_chars:
            return text
        return f"{text[: self.max_chars]}... (cut: {len(text)} characters)"


Outcome = tuple[Any, BaseException | None]
"""The value of a function, and what it raised."""


async def _outcome(tool: Tool, arguments: Mapping[str, Any]) -> Outcome:
    if not inspect.iscoroutinefunction(tool.function):
        return await in_thread(partial(_call, tool, arguments), name=f"tool {tool.name}")
    try:
        return await tool.function(**arguments), None
    except Exception as error:
        return None, error


def _call(tool: Tool, arguments: Mapping[str, Any]) -> Outcome:
    try:
        return tool.function(**arguments), None
    except BaseException as error:  # also SystemExit, whose name the model reads
        return None, error


def _location(error: BaseException, tool: Tool) -> str:
    """The type of an exception, and the last line in the file of the tool."""
    frames, code = traceback.extract_tb(error.__traceback__), getattr(inspect.unwrap(tool.function), "__code__", None)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename] or frames
    return f"{type(error).__name__} at {own[-1].filename}:{own[-1].lineno}"


def _readable(text: str) -> str:
    """The text with unpaired surrogates replaced, because tokenizers cannot read them."""
    return text.encode(errors="replace").decode()
