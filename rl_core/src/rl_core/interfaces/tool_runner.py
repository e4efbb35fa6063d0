"""Moved to `rl_core.tools`."""

from rl_core.first_use import import_on_first_use

__getattr__ = import_on_first_use(__name__, {}, moved={"rl_core.tools": "ToolUnavailableError current_session"})
