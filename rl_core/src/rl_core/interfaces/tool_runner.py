"""Moved to `rl_core.tools`."""

from rl_core.first_use import moved_module

__getattr__ = moved_module(__name__, "rl_core.tools")
