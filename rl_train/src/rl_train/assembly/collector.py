"""Creates the collector of a run's rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from rl_core.interfaces.environment import EnvironmentInterface
from rl_core.interfaces.generation import GenerationInterface
from rl_core.plugins.registry import Registry
from rl_train.assembly.agents import agent_drivers
from rl_train.config.schema import RunConfig
from rl_train.rollouts.collect import Collector
from rl_train.tools.task_tools import TaskTools


def make_collector(
    config: RunConfig,
    generation: GenerationInterface,
    environments: Mapping[str, EnvironmentInterface],
    tokenizer: Any,
    tools: TaskTools,
    *,
    registry: Registry,
    exits: ExitStack,
) -> Collector:
    """The collector of the config's rollouts. If a task has an agent, starts the endpoint; `exits` stops it."""
    return Collector(
        generation=generation,
        environments=environments,
        tokenizer=tokenizer,
        seed=config.algorithm.seed,
        max_turns=config.max_turns,
        max_total_length=config.policy.max_total_sequence_length,
        reward_weights={task: section.reward_weights for task, section in config.env.items()},
        retries=config.rollout.retries,
        tool_parsers=tools.parsers,
        history=config.rollout.history,
        drivers=agent_drivers(config, generation, tokenizer, registry=registry, exits=exits),
    )
