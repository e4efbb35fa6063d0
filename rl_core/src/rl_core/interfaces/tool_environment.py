"""Moved to `rl_core.tools.environment`."""

import warnings
from importlib import import_module
from typing import Any

warnings.warn("rl_core.interfaces.tool_environment has moved to rl_core.tools.", DeprecationWarning, stacklevel=2)


def __getattr__(name: str) -> Any:
    return getattr(import_module("rl_core.tools.environment"), name)
