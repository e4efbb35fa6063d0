"""The loss of a run, the collector of its rollouts, with the drivers of tasks with an agent, and the checks of its training."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from rl_core.config.schema import EnvironmentConfig
from rl_core.errors import ConfigError, with_key
from rl_core.interfaces.environment import EnvironmentInterface
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import LossFunction
from rl_core.plugins.component import Component, Kind
from rl_core.plugins.import_path import resolve
from rl_core.plugins.registry import Registry
from rl_train.agents.driver import AgentDriver
from rl_train.agents.model_server import ModelServer, ServerSettings
from rl_train.agents.session import SessionLimits
from rl_train.assembly.placement import share_cores
from rl_train.assembly.preparation import Preparation
from rl_train.assembly.weights import arithmetic
from rl_train.assembly.workers import Builder
from rl_train.config.schema import LossConfig, RunConfig
from rl_train.diagnostics.model_files import read_model_config
from rl_train.errors import reporting_errors
from rl_train.pools.elsewhere import AGENT_TARGET, AgentElsewhere, environment_component
from rl_train.rollouts.collect import Collector, RolloutLoop
from rl_train.run import Run
from rl_train.training_checks.agreement import Agreement
from rl_train.training_checks.checks import TrainingChecks
from rl_train.weight_sync.synchronizer import WeightSynchronizer

_log = logging.getLogger("rlcore")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


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
    takes_turns = config.rollout.max_staleness > 0 and device == "cpu" and share_cores(builder.cluster, builder.engine_cluster)
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
        with_sets=config.needs_sampled_sets,
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


def make_loss(component: Component, section: LossConfig) -> LossFunction:
    """The loss of a section.

    Raises:
        WrongKindError: its class is not a `LossFunction`.
        ConfigError: its constructor raised.
    """
    loss_class = component.load(expect=LossFunction)
    with reporting_errors(f"The loss {component.name}", loss_class):
        loss: LossFunction = loss_class(section)
    return loss


def loss_of(config: RunConfig, registry: Registry) -> LossFunction:
    """The loss of a run.

    Raises:
        ConfigError: the config names none and the algorithm has no default, or its constructor raised.
        WrongKindError: its class is not a loss.
    """
    name = config.loss_fn.name or config.algorithm.default_loss
    if name is None:
        raise ConfigError(f"loss_fn.name is required. {config.algorithm_name} has no default loss.")
    with with_key("loss_fn"):
        return make_loss(registry.find("loss", name), config.loss_fn)


def watch_training(run: Run, builder: Builder) -> None:
    """Check every optimizer step of the run until its components are closed."""
    config, registry = run.config, builder.registry
    agreement = _agreement(run, builder) if run.generation is not None else None
    weights = run.weights if isinstance(run.weights, WeightSynchronizer) else None
    checks = TrainingChecks(step=lambda: run.step, record=run.metrics.add, weights=weights, agreement=agreement)
    label = component_label(registry, Kind.POLICY, config.policy.backend, run.policy)
    if run.generation is not None and config.policy.generation is not None:
        backend = config.policy.generation.backend
        checks.engine_label = component_label(registry, Kind.GENERATION, backend, run.generation)
    if weights is not None:
        weights.sender.sent.label = label
    checks.watch(run.policy, label, builder.exits, is_policy=True)
    if run.value is not None and config.value is not None:
        value = component_label(registry, Kind.POLICY, config.value.backend, run.value, section="value")
        checks.watch(run.value, value, builder.exits, is_policy=False)
    if agreement is not None:
        run.keep("agreement", agreement)


def component_label(registry: Registry, kind: Kind, name: str, component: object, *, section: str = "") -> str:
    """The name of a component in errors: its kind, class, and the distribution and version that provide it."""
    matches = (each for each in registry.manager.registrations if each.kind is kind and each.component.name == name)
    source = next((f"{name!r} of {each.plugin.label}" for each in matches), f"{type(component).__module__}")
    return f"the {section or kind.label} {type(component).__name__} ({source})"


def _agreement(run: Run, builder: Builder) -> Agreement | None:
    """The rule for engine and policy; None if the engine's log-probabilities are of another distribution."""
    section, weights = run.config.policy.generation, run.weights
    if (
        section is None
        or not isinstance(weights, WeightSynchronizer)
        or run.generation is None
        or (section.sampling_filters() and not run.config.needs_sampled_sets)
        or section.logit_changes()
    ):
        return None
    sides, float32 = arithmetic(run.config, run.generation)
    return Agreement(
        sides=sides,
        exact=float32 and not _uses_tf32(run.generation) and not has_experts(run.config),
        has_canary=weights.canary is not None,
        tolerance=section.canary_tolerance,
    )


def _uses_tf32(generation: GenerationInterface) -> bool:
    """Whether float32 products of matrices are rounded on the device of this engine."""
    on_gpu = str(getattr(generation, "facts", {}).get("device", "cpu")).startswith("cuda")
    return on_gpu and torch.get_float32_matmul_precision() != "highest"


def has_experts(config: RunConfig) -> bool:
    """Whether the policy's model is a mixture of experts: a rounding error in its router can choose another expert."""
    hf = read_model_config(config.policy.model_name)
    text = hf.get_text_config(decoder=True) if hf is not None else None
    return any((getattr(text, key, None) or 0) > 1 for key in _EXPERT_KEYS)
