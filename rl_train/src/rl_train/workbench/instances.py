"""Instances of an environment for commands: in this process, or in a process of the interpreter that `python` names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl_core.config.schema import EnvironmentConfig
from rl_core.interfaces.environment import EnvironmentInterface
from rl_core.interfaces.records import Observation
from rl_core.plugins.registry import Registry
from rl_core.testing.environments.checks import constructor, parses_tool_calls
from rl_train.pools.actor_pool import ActorPool
from rl_train.pools.elsewhere import environment_component, environment_elsewhere, worker_elsewhere
from rl_train.rollouts.environment_pool import EnvironmentPool


class SessionPool(EnvironmentPool):
    """A pool of one worker, whose sessions are opened and closed by their caller, as those of an instance are."""

    def reset(self, metadata: dict[str, Any]) -> Observation | None:
        opened: Observation | None = self.pool.submit("reset", metadata).result()
        return opened

    def close(self, session: str) -> None:
        self.pool.submit("close", session).result()


def environment_factory(
    task: str, section: EnvironmentConfig, registry: Registry
) -> tuple[Callable[[], EnvironmentInterface], bool]:
    """A function that creates instances of a task's environment, and whether its messages are parsed for tool calls.

    With `python`, an instance is an `EnvironmentPool` of one process of that interpreter, as in a run.

    Raises:
        UserError: There is no such environment, or it lacks a requirement, here or in its interpreter.
    """
    elsewhere = environment_elsewhere(task, section, registry)
    if elsewhere is None:
        make = constructor(section, task, registry)
        return make, parses_tool_calls(make)
    worker_class, kwargs = worker_elsewhere(environment_component(task, section, registry), elsewhere, section)
    facade = SessionPool if elsewhere.keeps_sessions else EnvironmentPool

    def create() -> EnvironmentInterface:
        pool = ActorPool(
            None, worker_class, kwargs=kwargs, deadline_s=section.step_timeout_s, python=section.python, name=f"env.{task}"
        )
        return facade(pool, task_name=task, keeps_sessions=elsewhere.keeps_sessions)

    return create, bool(elsewhere.reads_tool_calls or elsewhere.tools)
