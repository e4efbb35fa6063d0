"""Checks that rollouts have the turns that their environments need."""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.config.source_tree import dotted
from rl_core.errors import ConfigError
from rl_core.plugins.registry import Registry
from rl_train.config.component_checks import Finding
from rl_train.config.schema import RunConfig
from rl_train.config.static_attribute import static_attribute


def turn_conflicts(run: RunConfig) -> Iterator[Finding]:
    """Environments that need more turns than the config allows, as far as this is known without importing them."""
    for task, section in run.env.items():
        needed = section.min_turns
        if section.env_cls is not None:
            stated = static_attribute(section.env_cls, "min_turns")
            needed = stated if isinstance(stated, int) else needed
        yield from _too_few_turns(run, task, needed)


def imported_turn_conflicts(run: RunConfig, registry: Registry) -> Iterator[Finding]:
    """As `turn_conflicts`, but imports the classes of the environments, whose `min_turns` may be inherited or computed."""
    for task, section in run.env.items():
        environment_class = registry.find("environment", section.env_cls or section.name or task).load()
        yield from _too_few_turns(run, task, max(section.min_turns, getattr(environment_class, "min_turns", 1)))


def check_turns(run: RunConfig, registry: Registry) -> None:
    """Refuse a run whose environments need more turns than the config allows, before its workers start.

    Raises:
        ConfigError: the config allows fewer turns than an environment needs.
    """
    for path, message in imported_turn_conflicts(run, registry):
        error = ConfigError(message)
        error.key = dotted(path)
        raise error


def _too_few_turns(run: RunConfig, task: str, needed: int) -> Iterator[Finding]:
    """The key that limits the turns of a task below what its environment needs."""
    allowed, section = run.max_turns[task], run.env[task]
    if allowed >= needed:
        return
    own = ("env", task, "max_rollout_turns")
    asked = run.algorithm.runtime_needs.max_turns
    if section.max_rollout_turns is not None or asked is None:
        path: tuple[str, ...] = own if section.max_rollout_turns is not None else ("env", task)
    else:
        path = (run.algorithm_name, "max_rollout_turns")
    yield (
        path,
        f"rollouts of task {task!r} have at most {allowed} {'turn' if allowed == 1 else 'turns'}, but environment "
        f"{section.env_cls or section.name or task} needs {needed} to give a reward. Set {'.'.join(own)} to {needed} or more.",
    )
