"""Runs rollouts of agents: functions with their own control loop that sample through an OpenAI client."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rl_core.errors import ConfigError
from rl_core.event_loop import finished, in_thread
from rl_core.interfaces.records import Message, messages_of
from rl_train.agents.model_server import ModelServer
from rl_train.agents.session import AgentSession, SessionLimits, failed_by_engine, image_url
from rl_train.rewards.functions import read_rewards
from rl_train.rollouts.drivers import RolloutDriver
from rl_train.rollouts.engines import RolloutSampler
from rl_train.rollouts.environment_pool import StepFailedError
from rl_train.rollouts.sessions import Session
from rl_train.rollouts.trajectory import Trajectory

ARGUMENTS = ("base_url", "api_key", "model", "messages", "metadata", "config")
"""Keyword arguments that agents may have."""


class AgentTimeoutError(Exception):
    """An agent did not return in time."""


class AgentWithoutTurnError(Exception):
    """An agent ended without sampling a turn."""


class AgentDriver(RolloutDriver):
    """Calls an agent once per rollout, in a separate thread, and records the turns that it samples.

    Args:
        agent: the function, also asynchronous. It gets those of `ARGUMENTS` that it has parameters for.
        server: the endpoint.
        tokenizer: the policy's.
        model: name of the model in the API.
        limits: limits of a rollout.
        timeout_s: timeout of one call of the agent, in seconds.
        task_name: named in errors.
        config: the section of the task, for agents that have a parameter for it.
        returns_reward: whether the agent returns the reward; otherwise, the environment scores the last conversation.

    Raises:
        ConfigError: the agent requires other arguments.
    """

    def __init__(
        self,
        agent: Callable[..., Any],
        server: ModelServer,
        tokenizer: Any,
        *,
        model: str,
        limits: SessionLimits,
        timeout_s: float,
        task_name: str,
        returns_reward: bool,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(agent):
            raise ConfigError(f"env.{task_name}.agent is a {type(agent).__name__}, not a function.")
        self._agent, self._names = agent, accepted_arguments(inspect.signature(agent), task_name)
        self._server, self._tokenizer, self._model = server, tokenizer, model
        self._limits, self._timeout_s = limits, timeout_s
        self._task_name, self._returns_reward, self._config = task_name, returns_reward, config or {}

    async def run(self, prompt: Trajectory, engine: RolloutSampler, session: Session | None) -> Trajectory:
        """Run the agent on a prompt, and return what it sampled; see `RolloutDriver`.

        Raises:
            StepFailedError: the agent raised, exceeded its timeout or sampled nothing, or its environment failed.
            ConfigError: the agent returned a reward, but its environment gives one.
            UserError: the agent returned something that is not a reward.
        """
        assert session is not None
        rollout = prompt
        rollout.metadata, observation = await session.open(rollout.metadata)
        messages = [*rollout.conversation(), *(messages_of(observation) if observation is not None else ())]
        turns = AgentSession(rollout, engine, self._tokenizer, limits=self._limits)
        key = self._server.open(turns)
        given = {
            "base_url": self._server.base_url,
            "api_key": key,
            "model": self._model,
            "messages": [_with_urls(message) for message in messages],
            "metadata": rollout.metadata,
            "config": self._config,
        }
        try:
            value = await self._call({name: given[name] for name in self._names})
        except Exception as error:
            raise StepFailedError(error) from error
        finally:
            self._server.close(key)
            turns.finish()
            rollout.done = True
            if turns.engine_error is not None and failed_by_engine(turns.engine_error):
                raise turns.engine_error
        if not rollout.turns:
            raise StepFailedError(AgentWithoutTurnError("the agent ended without sampling a turn"))
        await self._score(rollout, session, value)
        return rollout

    async def _call(self, arguments: Mapping[str, Any]) -> Any:
        """The agent's return value."""
        running = in_thread(lambda: finished(self._agent(**arguments)), name=f"agent-{self._task_name}")
        done, _ = await asyncio.wait([running], timeout=self._timeout_s)
        if not done:
            running.cancel()
            raise AgentTimeoutError(
                f"the agent did not return within {self._timeout_s:g} s (env.{self._task_name}.agent_timeout_s)"
            )
        return running.result()

    async def _score(self, rollout: Trajectory, session: Session, value: Any) -> None:
        """Add the rewards of the last turn; earlier turns have none."""
        for _ in range(rollout.turns - 1):
            rollout.add_rewards({})
        if self._returns_reward:
            rewards = read_rewards(value, name="reward", label=f"env.{self._task_name}.agent")
            rollout.scored = rewards is not None
            rollout.add_rewards(rewards or {})
            return
        if value is not None:
            raise ConfigError(
                f"env.{self._task_name}: the agent returned {value!r:.80}, but the task has an environment, which gives the "
                "reward. Return None, or remove the environment from the section."
            )
        result = await session.step(rollout.conversation(), rollout.metadata)
        rollout.scored, rollout.answer = result.scored, result.answer
        if result.metadata is not None:
            rollout.metadata = result.metadata
        rollout.add_rewards(result.rewards)


def _with_urls(message: Message) -> dict[str, Any]:
    """A message whose images an OpenAI client can send."""
    content: Any = message["content"]
    if isinstance(content, list):
        content = [
            {**part, "type": "image_url", "image_url": {"url": image_url(part["digest"])}} if part["type"] == "image" else part
            for part in content
        ]
    return {**message, "content": content}


def accepted_arguments(signature: inspect.Signature, task_name: str) -> tuple[str, ...]:
    """The names of `ARGUMENTS` that an agent with this signature has parameters for.

    Raises:
        ConfigError: it requires others.
    """
    key = f"env.{task_name}.agent"
    parameters = signature.parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return ARGUMENTS
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    required = {p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL}
    if unknown := sorted(required - by_name.intersection(ARGUMENTS)):
        raise ConfigError(
            f"{key} requires the argument {unknown[0]!r}. An agent is called with keywords and can have: "
            f"{', '.join(ARGUMENTS)}."
        )
    return tuple(name for name in ARGUMENTS if name in by_name)
