"""The agent `verifiers`: a task of a verifiers taskset runs and scores each rollout.

Imported by the interpreter that runs the agent, which has verifiers.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from openai import APIStatusError, AsyncOpenAI
from pydantic import ValidationError
from verifiers.v1 import Agent, AgentConfig, EvalClientConfig, Harness, HarnessConfig, ModelContext, Task, TaskData, Trace
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult, Runtime, SubprocessConfig
from verifiers.v1.utils.loaders import taskset_class, taskset_config_type

from rl_core.errors import ConfigError, RLCoreError
from rl_train.rewards.config import VerifiersConfig


class VerifiersTaskError(RLCoreError):
    """The task failed, or gave no reward."""


class _Conversation(Harness[HarnessConfig]):  # type: ignore[misc]
    """One response to the prompt, requested in this process: verifiers' own harnesses start a program per rollout."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """Send the prompt; a response that the task refused ends the rollout as it decided."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or [])
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            try:
                await client.chat.completions.create(model=ctx.model, messages=[*messages, *given])
            except APIStatusError as error:
                return ProgramResult(1, "", error.message)
        return ProgramResult(0, "", "")


async def solve(
    *,
    base_url: str,
    api_key: str,
    model: str,
    messages: Sequence[Mapping[str, Any]],
    metadata: Mapping[str, Any],
    config: Mapping[str, Any],
) -> dict[str, float]:
    """Run a task of the taskset, with the prompt and the metadata of a row as its data.

    Returns:
        The rewards by their names, each times its weight.

    Raises:
        ConfigError: There is no such taskset, or a setting of it or of the harness is wrong.
        VerifiersTaskError: The row lacks a field of the task, the task failed, or it gave no reward.
    """
    settings: VerifiersConfig = VerifiersConfig.model_validate(config)
    task = _task(settings, messages, metadata)
    with _key_in_environment(api_key) as variable:
        agent = _agent(settings, model, EvalClientConfig(base_url=base_url, api_key_var=variable))
        trace = await agent.run(task)
    if not trace.ok:
        cause = f"{trace.errors[-1].type}: {trace.errors[-1].message}" if trace.errors else "it names no error"
        raise VerifiersTaskError(f"the task of {settings.taskset} failed: {cause}")
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    if not rewards:
        raise VerifiersTaskError(f"the task of {settings.taskset} gave no reward: it needs a method with @reward")
    return rewards


def _agent(settings: VerifiersConfig, model: str, client: EvalClientConfig) -> Agent:
    harness = {"id": "null"} if settings.harness is None else settings.harness
    try:
        agent = Agent(AgentConfig(harness=harness, runtime=SubprocessConfig(), model=model, client=client))
    except (ImportError, ValidationError) as error:
        raise ConfigError(f"verifiers cannot use the harness {harness}: {error}", key="harness") from None
    if settings.harness is None:
        agent.harness = _Conversation(agent.harness.config)
    return agent


def _task(settings: VerifiersConfig, messages: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> Task:
    try:
        kind = taskset_class(settings.taskset).task_type()
        config = taskset_config_type(settings.taskset).model_validate({**settings.taskset_args, "id": settings.taskset})
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"{settings.taskset} is not a verifiers taskset: {error}", key="taskset") from None
    except ValidationError as error:
        raise ConfigError(f"The taskset {settings.taskset} refuses its arguments: {error}", key="taskset_args") from None
    known = kind.data_type().model_fields
    if "fields" in settings.model_fields_set and (unknown := sorted(settings.fields.keys() - known)):
        raise ConfigError(f"tasks of {settings.taskset} have no field {unknown[0]}, only {', '.join(known)}", key="fields")
    keys = {name: name for name in known} | settings.fields
    fields = {name: metadata[key] for name, key in keys.items() if key in metadata}
    try:
        return kind(kind.data_type().model_validate({**fields, "prompt": list(messages)}), config.task)
    except ValidationError as error:
        raise VerifiersTaskError(f"a row cannot be a task of {settings.taskset}: {error}") from None


@contextmanager
def _key_in_environment(api_key: str) -> Iterator[str]:
    """A variable with the key: verifiers reads keys from variables, and simultaneous rollouts have different keys."""
    variable = f"RLCORE_AGENT_{uuid.uuid4().hex}"
    os.environ[variable] = api_key
    try:
        yield variable
    finally:
        del os.environ[variable]
