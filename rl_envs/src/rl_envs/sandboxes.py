"""Opens the sandbox that a config section selects."""

from __future__ import annotations

from rl_core.plugins import Kind
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_sandbox.config import SandboxConfig
from rl_sandbox.interface import SandboxInterface


def open_sandbox(config: SandboxConfig) -> SandboxInterface:
    """Start the sandbox that `config.backend` names.

    Raises:
        SandboxUnavailableError: The isolation of this machine is weaker than `config.require`.
    """
    component = Registry(discover()).find(Kind.SANDBOX, config.backend)
    sandbox: SandboxInterface = component.load(expect=SandboxInterface)(config)
    return sandbox
