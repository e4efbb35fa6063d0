"""The environment `agent`: replaces an environment if the agent itself returns the reward."""

from __future__ import annotations

from typing import Any

from rl_core.config.schema import EnvironmentConfig
from rl_core.errors import ConfigError
from rl_core.interfaces.environment import EnvironmentInterface, EnvironmentReturn, Message


class AgentEnvironment(EnvironmentInterface):
    """Has no steps.

    Args:
        config: the section.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        self.config = config

    def step(self, message_log_batch: list[list[Message]], metadata: list[Any]) -> EnvironmentReturn:
        """Never called in a run.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("The agent of this task returns the rewards, so there is no environment that could be called.")
