"""The worker that runs agents with another interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_core.event_loop import finished
from rl_core.plugins.import_path import resolve


class AgentHost:
    """Calls an agent, also several times at once in separate threads.

    Args:
        agent: Import path of the function.
    """

    def __init__(self, agent: str) -> None:
        self._agent = resolve(agent, key="agent")

    def run(self, arguments: Mapping[str, Any]) -> Any:
        """What the agent returns for these keyword arguments."""
        return finished(self._agent(**arguments))
