"""Runs the Python code blocks of an answer in a sandbox and lets the model continue with their output, for bounded rounds."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rl_core.plugins.component import Kind
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_sandbox.config import SandboxConfig
from rl_sandbox.interface import Outcome, Result, SandboxError, SandboxInterface, SessionInterface
from rl_serve.errors import ApiError

_BLOCK = re.compile(
    r"^```[ \t]*(?:python|python3|py)[ \t]*\n(?P<code>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL | re.IGNORECASE
)


def python_blocks(text: str) -> list[str]:
    """The contents of the complete fenced blocks that are marked as Python, in order."""
    return [found["code"] for found in _BLOCK.finditer(text)]


class CodeRunner:
    """Opens one session per answer; variables are kept between the rounds of an answer.

    Args:
        config: where code runs, and its limits.
        max_rounds: maximum number of rounds of an answer.

    Raises:
        SandboxUnavailableError: the isolation of this machine is weaker than required.
    """

    def __init__(self, config: SandboxConfig, *, max_rounds: int) -> None:
        self.max_rounds = max_rounds
        component = Registry(discover()).find(Kind.SANDBOX, config.backend)
        self._sandbox: SandboxInterface = component.load(expect=SandboxInterface)(config)

    def close(self) -> None:
        """End all sessions and the sandbox."""
        self._sandbox.close()

    @asynccontextmanager
    async def answer(self) -> AsyncIterator[CodeSession]:
        """The session of one answer, which starts when the first code runs."""
        session = CodeSession(self._sandbox)
        try:
            yield session
        finally:
            # Also if the client hung up: closing ends a program that is running.
            await asyncio.shield(asyncio.to_thread(session.close))


class CodeSession:
    """The sandbox session of one answer.

    Args:
        sandbox: opens the session.
    """

    def __init__(self, sandbox: SandboxInterface) -> None:
        self._sandbox = sandbox
        self._session: SessionInterface | None = None
        self._is_closed = False

    async def run(self, blocks: list[str]) -> str:
        """What the blocks print, as a fenced block; an error is part of the output.

        Raises:
            ApiError: the sandbox could not start a session.
        """
        try:
            printed = await asyncio.to_thread(lambda: [self._run(code) for code in blocks])
        except SandboxError as error:
            raise ApiError(503, f"The sandbox failed: {error}", code="sandbox_failed") from error
        output = "\n".join(text for text in printed if text).rstrip("\n") or "(no output)"
        fence = "```" if "```" not in output else "````"
        return f"{fence}output\n{output}\n{fence}"

    def close(self) -> None:
        """End the session."""
        self._is_closed = True
        if self._session is not None:
            self._session.close()

    def _run(self, code: str) -> str:
        if self._session is None:
            self._session = self._sandbox.open_session()
            if self._is_closed:
                self._session.close()
        return _printed(self._session.run(code))


def _printed(result: Result) -> str:
    output = (result.stdout + result.stderr).rstrip("\n")
    if result.truncated:
        output += "\n(output was cut)"
    if result.outcome is Outcome.TIMEOUT:
        output += f"\n(stopped after {result.seconds:.0f} seconds)"
    if result.outcome in (Outcome.KILLED, Outcome.LOST):
        output += "\n(ended: it used too much memory or CPU time, or ended its own processes)"
    return output.lstrip("\n")
