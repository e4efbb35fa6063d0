"""The section of `nemo_gym`. Lightweight imports only."""

from __future__ import annotations

from pydantic import Field

from rl_core.config.schema import EnvironmentConfig


class NemoGymConfig(EnvironmentConfig):
    """`env.nemo_gym`: a resources server of NeMo Gym, which has the tools and verifies the rollouts."""

    url: str = Field(pattern="^https?://")
    """URL of the resources server, such as `http://localhost:8000`."""
    max_tool_turns: int = Field(default=8, ge=0)
    """Maximum number of turns with tool calls in a rollout. Calls of later turns are not run, and the rollout is verified."""
    timeout_s: float = Field(default=60.0, gt=0.0)
    """Timeout of one request, in seconds."""
    success_reward: float = 1.0
    """Reward from which a rollout counts as correct in `accuracy`."""

    @property
    def turns_needed(self) -> int:
        return self.max_tool_turns + 1
