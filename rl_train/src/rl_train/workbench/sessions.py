"""Sessions of environments that keep state between the turns of a rollout, for callers without a pool of workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_core.interfaces.environment import EnvironmentInterface, keeps_sessions
from rl_core.interfaces.messages import messages_of
from rl_train.rollouts.environment_checks import checked_observation
from rl_train.rollouts.sessions import SESSION_KEY


class LocalSession:
    """The session of one rollout; does nothing if the environment keeps no sessions.

    Args:
        environment: an instance in this process.
        name: `session_id` of the rollout.
    """

    def __init__(self, environment: EnvironmentInterface, name: str) -> None:
        self._environment, self._name = environment, name
        self._is_kept = keeps_sessions(type(environment))

    def open(self, metadata: Any) -> tuple[Any, list[Mapping[str, Any]]]:
        """Begin the session; returns the metadata of the first step, and messages that are added to the prompt."""
        if not self._is_kept:
            return metadata, []
        metadata = self.named(metadata or {})
        observation = self._environment.reset(metadata)
        if observation is None:
            return metadata, []
        return metadata, [*messages_of(checked_observation(observation, task_name=type(self._environment).__name__))]

    def named(self, metadata: Any) -> Any:
        """Metadata for the next step, with the name of the session."""
        return metadata | {SESSION_KEY: self._name} if self._is_kept else metadata

    def close(self) -> None:
        """End the session."""
        if self._is_kept:
            self._environment.close(self._name)
