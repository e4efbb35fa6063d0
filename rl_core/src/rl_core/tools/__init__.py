"""Tools: a function's schema, its calls, and an environment that answers them."""

from rl_core.tools.environment import ToolEnvironment
from rl_core.tools.runner import ToolUnavailableError, current_session
from rl_core.tools.specs import Tool, ToolArgumentError

__all__ = ["Tool", "ToolArgumentError", "ToolEnvironment", "ToolUnavailableError", "current_session"]
