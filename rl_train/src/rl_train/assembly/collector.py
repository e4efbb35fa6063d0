"""Creates the collector of a run's rollouts."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from rl_core.interfaces.environment import EnvironmentInterface
from rl_core.interfaces.generation import GenerationInterface
from rl_train.assembly.agents import agent_drivers
from rl_train.assembly.preparation import Preparation
from rl_train.assembly.workers import Builder
from rl_train.rollouts.collect import Collector
from rl_train.rollouts.loop import RolloutLoop


def make_collector(
    builder: Builder,
    prepared: Preparation,
    generation: GenerationInterface,
    environments: Mapping[str, EnvironmentInterface],
) -> Collector:
    """The collector of a run's rollouts. If a task has an agent, starts the endpoint, which `builder.exits` stops."""
    config, tokenizer = builder.run, prepared.tokenizer
    threaded = builder.cluster is not None
    if threaded:
        generation.refit_thread = threading.get_ident()
    loop = RolloutLoop(threaded=threaded)
    builder.exits.callback(loop.close)
    return Collector(
        generation=generation,
        environments=environments,
        tokenizer=tokenizer,
        seed=config.algorithm.seed,
        max_turns=config.max_turns,
        max_total_length=config.policy.max_total_sequence_length,
        reward_weights={task: section.reward_weights for task, section in config.env.items()},
        retries=config.rollout.retries,
        tool_parsers=prepared.tools.parsers,
        history=config.rollout.history,
        row_by_row=config.rollout.max_staleness > 0,
        timeout_s=config.rollout.timeout_s,
        loop=loop,
        drivers=agent_drivers(config, generation, tokenizer, registry=builder.registry, exits=builder.exits),
    )
