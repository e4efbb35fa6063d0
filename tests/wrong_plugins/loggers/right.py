"""The right control: one JSON line for each step."""

from wrong_plugins.loggers.base import Lines as Logger

__all__ = ["Logger"]
