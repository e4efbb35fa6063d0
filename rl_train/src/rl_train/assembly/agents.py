"""Creates the drivers of tasks with agents, and the endpoint that they share."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rl_core.errors import ConfigError
from rl_core.interfaces.generation import GenerationInterface
from rl_core.plugins.component import Kind
from rl_core.plugins.import_path import resolve
from rl_core.plugins.registry import Registry
from rl_train.agents.config import AgentEnvironmentConfig
from rl_train.agents.driver import AgentDriver
from rl_train.agents.model_server import ModelServer, ServerSettings
from rl_train.agents.session import SessionLimits
from rl_train.config.schema import RunConfig


def agent_drivers(
    config: RunConfig, generation: GenerationInterface, tokenizer: Any, *, registry: Registry, exits: ExitStack
) -> dict[str, AgentDriver]:
    """The drivers of the tasks with an agent; starts the endpoint if there are any.

    Args:
        config: the run.
        generation: its engine.
        tokenizer: the policy's.
        registry: provides the endpoint.
        exits: stops it.

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
    agents = {task: resolve(str(section.agent), key=f"env.{task}.agent") for task, section in sections.items()}
    model = Path(config.policy.model_name).name
    settings = ServerSettings(tokenizer=tokenizer, model=model, temperature=config.policy.generation.temperature)
    server = _server(registry, first)(settings)
    exits.callback(server.shutdown)
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
            returns_reward=isinstance(section, AgentEnvironmentConfig),
        )
        for task, section in sections.items()
    }


def _server(registry: Registry, key: str) -> type[ModelServer]:
    servers = registry.all(Kind.MODEL_SERVER)
    if len(servers) != 1:
        names = ", ".join(component.name for component in servers)
        what = f"several plugins provide one ({names}): disable all but one" if servers else "rl-serve provides one: install it"
        raise ConfigError(f"{key}: agents need a local endpoint, and {what}.")
    server: type[ModelServer] = servers[0].load(expect=ModelServer)
    return server
