"""The worker that runs agents with another interpreter."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

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
        return run_agent(self._agent, arguments)


def run_agent(agent: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call an agent with keyword arguments and, if it is asynchronous, wait for its result."""
    found = agent(**arguments)
    return asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found


async def _awaited(found: Any) -> Any:
    return await found
