"""The section of environments with tools. Lightweight imports only."""

from __future__ import annotations

from pydantic import Field

from rl_core.config.schema import EnvironmentConfig


class ToolEnvironmentConfig(EnvironmentConfig):
    """Base section of environments whose model calls tools."""

    max_tool_turns: int = Field(default=4, ge=1)
    """Maximum number of turns with tool calls in a rollout. One more turn is for the final answer; if it calls tools again, the
    rollout ends without an answer."""
    call_timeout_s: float = Field(default=30.0, gt=0.0)
    """Timeout of one tool call, in seconds. When it expires, the result is an error message."""
    max_concurrent_calls: int = Field(default=16, ge=1)
    """Maximum number of tool calls that run at the same time in a worker process."""
    max_result_chars: int = Field(default=4000, ge=1)
    """Maximum length of a tool result in characters. Longer results are truncated, with a note of their original length."""
    invalid_call_penalty: float = Field(default=0.0, ge=0.0)
    """Value subtracted from the reward for every invalid call: one that cannot be parsed, names an unknown tool, has wrong
    arguments, raises an exception or times out."""

    @property
    def turns_needed(self) -> int:
        return self.max_tool_turns + 1

    @property
    def reward_names(self) -> tuple[str, ...]:
        return ("invalid_calls",) if self.invalid_call_penalty else ()

    @property
    def min_turns(self) -> int:
        return 2
