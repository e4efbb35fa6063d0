"""Isolated execution of model-written programs. Importing this package loads none of its modules."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_sandbox.config import SandboxConfig
    from rl_sandbox.interface import Outcome, Result, SandboxError, SandboxInterface, SessionInterface
    from rl_sandbox.local import LocalSandbox

__all__ = ["LocalSandbox", "Outcome", "Result", "SandboxConfig", "SandboxError", "SandboxInterface", "SessionInterface"]

_MODULES = {
    "LocalSandbox": "rl_sandbox.local",
    "Outcome": "rl_sandbox.interface",
    "Result": "rl_sandbox.interface",
    "SandboxConfig": "rl_sandbox.config",
    "SandboxError": "rl_sandbox.interface",
    "SandboxInterface": "rl_sandbox.interface",
    "SessionInterface": "rl_sandbox.interface",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
