"""Environments and agents that run with another interpreter (`env.<task>.python`), which the driver does not import.

Backends that do are imported by the driver as well; it only asks whether their workers can be.
"""

from __future__ import annotations

import inspect
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rl_core.cluster.isolation import probe, runtime_env_of
from rl_core.cluster.virtual_cluster import RayVirtualCluster
from rl_core.config.diagnostics import dotted
from rl_core.config.schema import EnvironmentConfig
from rl_core.errors import ConfigError, UserError, with_key
from rl_core.event_loop import finished
from rl_core.interfaces.records import ToolSpec
from rl_core.plugins.component import Component, Kind, is_path
from rl_core.plugins.import_path import MODULE_FOLDERS, resolve
from rl_core.plugins.registry import Registry
from rl_core.testing.environments.checks import constructor_config
from rl_train.pools import component_probe
from rl_train.pools.actor_pool import ActorPool

AGENT_TARGET = "rl_train.agents.environment:AgentEnvironment"
"""Target of the components whose agents return the reward. It has no steps, and runs with the driver's interpreter."""
_AGENTS_PER_WORKER = 64
_HEAD_NODE = {"node:__internal_head__": 0.001}
"""Ray resource of the node on which the endpoint for agents listens."""


class ClassReference:
    """Stands for a class in the driver, and is unpickled as the class itself.

    Args:
        target: "module:Class".
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self.__module__, _, self.__qualname__ = target.partition(":")
        self.__name__ = self.__qualname__

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(resolve, key="python"), (self._target,)


@dataclass(frozen=True, kw_only=True)
class EnvironmentFacts:
    """What a run must know about an environment class.

    Attributes:
        parameter: First parameter of its constructor, which gets the section; None if it has none.
        keeps_sessions: Whether it has `reset` or `close`.
        reads_token_ids: Whether it gets the sampled tokens of a message.
        min_turns: Number of turns without which it gives no reward.
        tools: The functions that it offers to the model.
        reads_tool_calls: Whether tool calls in the model's messages are parsed.
    """

    parameter: str | None
    keeps_sessions: bool
    reads_token_ids: bool
    min_turns: int
    tools: Sequence[ToolSpec]
    reads_tool_calls: bool


def environment_component(task: str, section: EnvironmentConfig, registry: Registry) -> Component:
    """The component of a task's environment.

    Raises:
        PluginError: There is none. The path of a class that runs elsewhere is not looked up.
    """
    return find_environment(section.env_cls or section.name or task, section.python, registry)


def find_environment(name: str, python: str | None, registry: Registry) -> Component:
    """As `environment_component`, by name or path and interpreter."""
    return Component.from_path(name) if python and is_path(name) else registry.find(Kind.ENVIRONMENT, name)


def environment_elsewhere(task: str, section: EnvironmentConfig, registry: Registry) -> EnvironmentFacts | None:
    """The facts of an environment that runs with another interpreter, from that interpreter; None for all others.

    Raises:
        ConfigError: The interpreter cannot run the environment; names what to install.
    """
    component = environment_component(task, section, registry)
    if section.python is None or component.target == AGENT_TARGET:
        return None
    values = section.model_dump(mode="json", exclude={"env_cls"} if section.env_cls is not None else None)
    what = f"the environment {component.name!r}"
    question = {"component": asdict(component), "values": values}
    with with_key(dotted(("env", task, "python"))):
        answer = _probed(section.python, what, component, registry, environment=question)
    return EnvironmentFacts(**answer["environment"])


def worker_elsewhere(
    component: Component, facts: EnvironmentFacts, section: EnvironmentConfig
) -> tuple[ClassReference, Mapping[str, Any]]:
    """Class and constructor arguments of the workers of an environment that runs with another interpreter."""
    kwargs = {} if facts.parameter is None else {facts.parameter: constructor_config(section)}
    return ClassReference(component.target), kwargs


def check_backend_elsewhere(python: str, component: Component, registry: Registry) -> None:
    """Check that another interpreter can run the workers of a policy or an engine.

    Raises:
        ConfigError: It lacks the version of the plugin, or what the plugin requires; names what to install.
    """
    _probed(python, f"the backend {component.name!r}", component, registry)


class AgentElsewhere:
    """An agent that runs in worker processes of another interpreter; called like the agent itself.

    Args:
        cluster: Cluster whose head node runs the workers.
        task: Name of the task.
        section: Its section, with `agent` and `python`.

    Raises:
        ConfigError: The interpreter cannot run the agent; names what to install.
    """

    def __init__(self, cluster: RayVirtualCluster, task: str, section: EnvironmentConfig, registry: Registry) -> None:
        self.__signature__ = agent_signature(task, section, registry)
        self._pool = ActorPool(
            cluster,
            AgentHost,
            section.num_workers,
            {"agent": section.agent},
            deadline_s=math.inf,  # the driver of the rollout stops waiting after `agent_timeout_s`
            max_concurrency=_AGENTS_PER_WORKER,
            actor_options={"resources": _HEAD_NODE},
            python=section.python,
            name=f"agent.{task}",
        )
        self.shutdown = self._pool.shutdown

    def __call__(self, **arguments: Any) -> Any:
        return self._pool.submit("run", arguments).result()


def agent_signature(task: str, section: EnvironmentConfig, registry: Registry) -> inspect.Signature:
    """The signature of an agent that runs with another interpreter, read there.

    Raises:
        ConfigError: The interpreter cannot run the agent; names what to install.
    """
    assert section.python is not None
    component = environment_component(task, section, registry)
    own = component if component.target == AGENT_TARGET and component.name not in (AGENT_TARGET, "agent") else None
    answer = _probed(section.python, f"the agent {section.agent!r}", own, registry, host="rl-train", agent=section.agent)
    kinds = inspect.Parameter.empty, None
    return inspect.Signature(
        [
            inspect.Parameter(one, getattr(inspect.Parameter, kind), default=kinds[0] if is_required else kinds[1])
            for one, kind, is_required in answer["agent"]
        ]
    )


def _probed(
    python: str, what: str, component: Component | None, registry: Registry, *, host: str | None = None, **question: Any
) -> dict[str, Any]:
    """Ask another interpreter about a component.

    Args:
        python: The interpreter.
        what: The component, in errors.
        component: The component whose plugin must be installed there; None for a function given by its path.
        registry: The plugins.
        host: The distribution of the class that runs it, if that is not rl-core.
        question: See `component_probe.report`.
    """
    plugins = [one.plugin for one in registry.manager.registrations if one.component == component]
    distributions = {plugin.distribution: plugin.version for plugin in plugins}
    if host is not None:
        distributions[host] = version(host)
    needs, install = (component.needs, component.install) if component is not None else ((), None)
    request = {**question, "distributions": distributions, "needs": needs, "folders": [os.getcwd(), *MODULE_FOLDERS]}
    path = runtime_env_of(python)["py_executable"]
    try:
        answer = _answer(path, json.dumps(request))
    except UserError as error:
        raise ConfigError(f"{what} cannot run with {path}: {error}") from error
    if problems := answer["problems"]:
        wanted = [f"{name}=={number}" for name, number in distributions.items()]
        wanted += [install.removeprefix("pip install ")] if install else []
        remedy = f" Install what is missing: {path} -m pip install {' '.join(wanted)}" if wanted else ""
        raise ConfigError(f"{what} cannot run with {path}: {'; '.join(problems)}.{remedy}")
    return answer


@lru_cache(maxsize=64)
def _answer(path: str, request: str) -> dict[str, Any]:
    return probe(path, Path(component_probe.__file__).read_text(), request)


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
