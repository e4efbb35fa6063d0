"""Moved to `rl_core.tools`."""

import warnings
from importlib import import_module
from typing import Any

warnings.warn("rl_core.interfaces.tool_runner has moved to rl_core.tools.", DeprecationWarning, stacklevel=2)


def __getattr__(name: str) -> Any:
    return getattr(import_module("rl_core.tools"), name)
