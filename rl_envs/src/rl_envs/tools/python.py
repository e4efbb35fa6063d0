"""The tool `python`: model-written programs in a sandbox."""

from __future__ import annotations

from rl_core.plugins.component import Kind
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_sandbox.config import SandboxConfig
from rl_sandbox.interface import Outcome, SandboxInterface


class SandboxedPython:
    """Runs each call in a new session of a sandbox, which starts with `start` and shares nothing between calls.

    Args:
        config: Where programs run, and their limits.
    """

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._sandbox: SandboxInterface | None = None

    def start(self) -> None:
        """Start the sandbox.

        Raises:
            SandboxUnavailableError: The isolation of this machine is weaker than `sandbox.require`.
        """
        if self._sandbox is None:
            component = Registry(discover()).find(Kind.SANDBOX, self._config.backend)
            self._sandbox = component.load(expect=SandboxInterface)(self._config)

    def close(self) -> None:
        """End the sandbox."""
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None

    def python(self, code: str) -> str:
        """Runs a Python program and returns what it prints. Variables are not kept between calls.

        Args:
            code: Python source. The value of the last expression is printed.
        """
        self.start()
        assert self._sandbox is not None
        with self._sandbox.open_session() as session:
            result = session.run(code)
        output = result.stdout + result.stderr
        if result.truncated:
            output += "\n(output was cut)"
        if result.outcome is Outcome.TIMEOUT:
            return f"{output}\nThe program was stopped after {self._config.timeout_s:g} seconds.".strip()
        if result.outcome in (Outcome.KILLED, Outcome.LOST):
            return f"{output}\nThe program was ended: it used too much memory or CPU time, or ended its own processes.".strip()
        return output.rstrip("\n") or "(no output)"
