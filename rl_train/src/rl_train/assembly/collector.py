"""Creates the collector of a run's rollouts, with the drivers of tasks that have an agent."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_core.config.schema import EnvironmentConfig
from rl_core.errors import ConfigError
from rl_core.interfaces.environment import EnvironmentInterface
from rl_core.interfaces.generation import GenerationInterface
from rl_core.plugins.component import Kind
from rl_core.plugins.import_path import resolve
from rl_core.plugins.registry import Registry
from rl_train.agents.driver import AgentDriver
from rl_train.agents.model_server import ModelServer, ServerSettings
from rl_train.agents.session import SessionLimits
from rl_train.assembly.preparation import Preparation
from rl_train.assembly.workers import Builder
from rl_train.config.schema import RunConfig
from rl_train.pools.elsewhere import AGENT_TARGET, AgentElsewhere, environment_component
from rl_train.rollouts.collect import Collector
from rl_train.rollouts.loop import RolloutLoop

_log = logging.getLogger("rlcore")


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
    device = getattr(generation, "facts", {}).get("device")
    takes_turns = config.rollout.max_staleness > 0 and device == "cpu" and builder.shares_cores
    if takes_turns:
        _log.info("the policy and the engine have the same cores: rollouts wait while the policy trains")
    loop = RolloutLoop(threaded=threaded, takes_turns=takes_turns)
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
        row_by_row=config.rollout.max_staleness > 0 and config.rollout.order == "ready",
        timeout_s=config.rollout.timeout_s,
        loop=loop,
        deadline_s=_deadline_s(config),
        drivers=_agent_drivers(config, generation, tokenizer, builder),
    )


def _deadline_s(config: RunConfig) -> float:
    """Upper bound of the time in which no rollout continues, because calls of engine, environments and agents end by then."""
    calls = [section.step_timeout_s for section in config.env.values()]
    agents = [section.agent_timeout_s for section in config.env.values() if section.agent is not None]
    return config.cluster.deadlines.generate_s + max(calls, default=0.0) + max(agents, default=0.0)


def _agent_drivers(
    config: RunConfig, generation: GenerationInterface, tokenizer: Any, builder: Builder
) -> dict[str, AgentDriver]:
    """The drivers of the tasks with an agent; starts the endpoint if there are any.

    Args:
        config: the run.
        generation: its engine.
        tokenizer: the policy's.
        builder: its registry provides the endpoint, which its `exits` stop.

    Raises:
        ConfigError: the engine or the tokenizer does not support agents, an agent cannot be imported, or no installed plugin
            has an endpoint.
    """
    sections = {task: section for task, section in config.env.items() if section.agent is not None}
    if not sections:
        return {}
    first = f"env.{next(iter(sections))}.agent"
    if not generation.streams_rows:
        raise ConfigError(
            f"{first}: agents need an engine that samples single rows, but {type(generation).__name__} has no `generate_async`."
        )
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(f"{first}: agents send messages, which need a chat template. Set policy.tokenizer.chat_template.")
    assert config.policy.generation is not None
    agents = {task: _agent(task, section, builder) for task, section in sections.items()}
    model = Path(config.policy.model_name).name
    settings = ServerSettings(tokenizer=tokenizer, model=model, temperature=config.policy.generation.temperature)
    server = _server(builder.registry, first)(settings)
    builder.exits.callback(server.shutdown)
    return {
        task: AgentDriver(
            agents[task],
            server,
            tokenizer,
            model=model,
            limits=SessionLimits(
                max_turns=config.max_turns[task],
                max_total_length=config.policy.max_total_sequence_length,
                max_new_tokens=config.policy.generation.max_new_tokens,
            ),
            timeout_s=section.agent_timeout_s,
            task_name=task,
            returns_reward=environment_component(task, section, builder.registry).target == AGENT_TARGET,
            config=section.model_dump(),
        )
        for task, section in sections.items()
    }


def _agent(task: str, section: EnvironmentConfig, builder: Builder) -> Callable[..., Any]:
    """The agent of a task, which may run with another interpreter."""
    if section.python is None or builder.cluster is None:
        found: Callable[..., Any] = resolve(str(section.agent), key=f"env.{task}.agent")
        return found
    agent = AgentElsewhere(builder.cluster, task, section, builder.registry)
    builder.exits.callback(agent.shutdown)
    return agent


def _server(registry: Registry, key: str) -> type[ModelServer]:
    servers = registry.all(Kind.MODEL_SERVER)
    if len(servers) != 1:
        names = ", ".join(component.name for component in servers)
        what = f"several plugins provide one ({names}): disable all but one" if servers else "rl-serve provides one: install it"
        raise ConfigError(f"{key}: agents need a local endpoint, and {what}.")
    server: type[ModelServer] = servers[0].load(expect=ModelServer)
    return server
