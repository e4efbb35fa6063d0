"""Rollout drivers: how one rollout is run, as a coroutine."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

from rl_core.environments.step_results import StepResult
from rl_core.errors import DataError
from rl_core.interfaces.messages import Observation, messages_of
from rl_train.data.decoding import decode_answers, hidden_tokens
from rl_train.data.messages import prompt_log
from rl_train.rollouts.engines import RolloutSampler
from rl_train.rollouts.failures import StepFailedError
from rl_train.rollouts.history import HISTORIES
from rl_train.rollouts.sessions import Session
from rl_train.rollouts.trajectory import Trajectory
from rl_train.tools.parsers import ToolCallParser

_log = logging.getLogger("rlcore")


class RolloutDriver(ABC):
    """Runs rollouts. A driver keeps no state between them, because many run at the same time."""

    @abstractmethod
    async def run(self, prompt: Trajectory, engine: RolloutSampler, session: Session | None) -> Trajectory:
        """Run one rollout to its end.

        Args:
            prompt: the rollout with only its prompt; it is continued in place.
            engine: samples its turns.
            session: its environment; None without environments.

        Returns:
            The finished rollout.
        """


class EnvironmentDriver(RolloutDriver):
    """Turns of the model and responses of an environment alternate, until the environment or a limit ends the rollout.

    Args:
        tokenizer: decodes what the environment reads and tokenizes what it writes.
        max_turns: maximum number of turns, by task name.
        max_total_length: maximum number of tokens of a segment; a rollout that reaches it is truncated.
        tool_parsers: parsers of tool calls, by task name.
        history: `rollout.history`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_turns: Mapping[str, int],
        max_total_length: int,
        tool_parsers: Mapping[str, ToolCallParser] | None = None,
        history: str = "as_sampled",
    ) -> None:
        self._tool_parsers = tool_parsers or {}
        self._tokenizer, self._max_turns, self._max_total_length = tokenizer, max_turns, max_total_length
        self._has_warned = False
        self._history = HISTORIES[history](tokenizer) if max(max_turns.values(), default=1) > 1 else None

    async def run(self, prompt: Trajectory, engine: RolloutSampler, session: Session | None) -> Trajectory:
        """Run a rollout with its environment. Without a session, it is one answer without a reward."""
        rollout = prompt
        if session is not None:
            rollout.metadata, observation = await session.open(rollout.metadata)
            self._add_to_prompt(rollout, observation)
        while not rollout.done:
            sampled = await engine.sample(
                rollout.token_ids(), stop_strings=rollout.stop_strings, messages=rollout.conversation()
            )
            [text] = decode_answers(self._tokenizer, [sampled.token_ids])
            self._warn_of_hidden(sampled.token_ids[:-1].tolist())
            rollout.add_answer(
                text,
                sampled.token_ids,
                sampled.logprobs,
                weight_version=sampled.weight_version,
                token_versions=sampled.token_versions,
                parser=self._tool_parsers.get(rollout.task_name),
            )
            rollout.truncated = sampled.truncated
            if session is None:
                rollout.done = True
            else:
                self._continue(rollout, await session.step(rollout.conversation(), rollout.metadata))
        return rollout

    def _warn_of_hidden(self, token_ids: list[int]) -> None:
        """Warn once if a reward does not see tokens before the end of a completion."""
        hidden = hidden_tokens(self._tokenizer)
        if not self._has_warned and not hidden.isdisjoint(token_ids):
            self._has_warned = True
            _log.warning("sampled completions: %s", describe_hidden(self._tokenizer, hidden.intersection(token_ids)))

    def _add_to_prompt(self, rollout: Trajectory, observation: Observation | None) -> None:
        """Render the prompt again with the messages of the environment."""
        if observation is None:
            return
        messages = [*rollout.conversation(), *messages_of(observation)]
        log = prompt_log(messages, self._tokenizer, tools=rollout.tools, prefill=rollout.prefill)
        rollout.message_log = [{**message, "token_ids": part["token_ids"]} for message, part in zip(messages, log, strict=True)]
        if rollout.num_tokens() >= self._max_total_length:
            raise StepFailedError(
                DataError(
                    f"the prompt with the messages of `reset` has {rollout.num_tokens()} tokens, which leaves no space for an "
                    f"answer within {self._max_total_length} (policy.max_total_sequence_length)"
                )
            )

    def _continue(self, rollout: Trajectory, result: StepResult) -> None:
        rollout.add_rewards(result.rewards)
        rollout.scored = rollout.scored and result.scored
        rollout.answer, rollout.stop_strings = result.answer, result.stop_strings
        if result.metadata is not None:
            rollout.metadata = result.metadata
        rollout.done = result.terminated or rollout.truncated or rollout.turns >= self._max_turns[rollout.task_name]
        if rollout.done or self._history is None:
            return
        prompt = self._history.next_prompt(rollout, result.observation)
        length = len(prompt.token_ids) + (rollout.num_tokens() if prompt.continues else 0)
        if length >= self._max_total_length:
            rollout.done = rollout.truncated = True
        elif prompt.continues:
            rollout.add_observation(result.observation, prompt.token_ids)
        else:
            rollout.start_segment(result.observation, prompt.token_ids)


def describe_hidden(tokenizer: Any, hidden: Collection[int]) -> str:
    """A sentence that names special tokens that rewards do not see, and the key that shows them."""
    names = ", ".join(tokenizer.convert_ids_to_tokens(sorted(hidden)))
    seen = f"do not see {names}" if names else "see all special tokens"
    visible = vars(tokenizer).get("visible_special_tokens", "content")
    return f"rewards, tools and logs {seen} (policy.tokenizer.visible_special_tokens: {visible})"
