"""A rollout that grows turn by turn, and finished rollouts as rows of a batch."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.schema import pad_value
from rl_core.interfaces.messages import MESSAGE_KEYS, Message, Observation, ToolSpec, messages_of
from rl_train.tools.parsers import SampledMessage, ToolCallParser
from rl_train.tools.selection import parse_message


@dataclass(kw_only=True)
class Trajectory:
    """An unfinished or finished conversation; its tokens are the training sequence."""

    message_log: list[dict[str, Any]]
    """Messages with `role`, `content`, `token_ids` [T]; sampled ones also with `generation_logprobs` [T] and
    `weight_version`."""
    metadata: Any
    """The environment's state for this row."""
    task_name: str
    """Task, which selects the environment."""
    group_id: int
    """Shared by all rows of a prompt."""
    index: int
    """Index of the record in the dataset."""
    ordinal: int
    """The prompt's number in the endless order of draws, from 0; see `rl_train.rollouts.seeds`."""
    sample: int
    """Index of the sample in its group."""
    loss_multiplier: float = 1.0
    """0 excludes the row from the loss."""
    stop_strings: list[str] | None = None
    """Stop strings of the next turn."""
    reward: float = 0.0
    """Sum over turns of all rewards, weighted."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Rewards by name, summed over turns; `reward` if the environment returns only one."""
    turn_rewards: list[dict[str, float]] = field(default_factory=list)
    """Rewards by name, for each turn that was scored."""
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of named rewards that are not 1."""
    scored: bool = True
    """Whether the environment could score every turn; otherwise the row counts neither in statistics nor in the loss."""
    failure: str | None = None
    """Type and first line of the error that kept the row from being scored; None if there was none."""
    failure_details: str = ""
    """The whole text of that error."""
    retries: int = 0
    """Number of repeated environment steps."""
    truncated: bool = False
    """Whether a limit truncated the last turn."""
    done: bool = False
    """Whether the environment or a limit has ended it."""
    turns: int = 0
    """Number of sampled turns."""
    answer: str | None = None
    """The answer that the environment extracted."""
    tools: list[dict[str, Any]] | None = None
    """The tools offered to the model."""

    def token_ids(self) -> torch.Tensor:
        """[T] int64, all tokens so far."""
        return torch.cat([message["token_ids"] for message in self.message_log])

    def num_tokens(self) -> int:
        """T."""
        return sum(len(message["token_ids"]) for message in self.message_log)

    def num_sampled_tokens(self) -> int:
        """Number of sampled tokens of all turns."""
        return sum(len(message["token_ids"]) for message in self.message_log if "generation_logprobs" in message)

    @property
    def weight_version(self) -> int:
        """The oldest version of the weights that sampled a turn; -1 if none was sampled."""
        return min((message["weight_version"] for message in self.message_log if "weight_version" in message), default=-1)

    def add_answer(
        self,
        text: str,
        token_ids: torch.Tensor,
        logprobs: torch.Tensor,
        *,
        weight_version: int = -1,
        parser: ToolCallParser | None = None,
    ) -> None:
        """Append a sampled message; with a parser, its tool calls are separated from its content."""
        message = {"role": "assistant", "content": text, "token_ids": token_ids, "generation_logprobs": logprobs}
        if parser is not None:
            sampled = SampledMessage(
                text=text,
                token_ids=token_ids.tolist(),
                prompt_ids=self.token_ids().tolist(),
                tools=cast("list[ToolSpec]", self.tools or []),
            )
            parsed = parse_message(parser, sampled, self.message_log)
            if parsed.calls:
                message |= {"content": parsed.content, "tool_calls": parsed.calls, "sampled_text": text}
        self.message_log.append({**message, "weight_version": weight_version})
        self.turns += 1

    def add_observation(self, observation: Observation, token_ids: torch.Tensor) -> None:
        """Append what the model reads next; the last message has all tokens, [T]."""
        messages = messages_of(observation)
        for number, message in enumerate(messages, start=1):
            own = token_ids if number == len(messages) else token_ids[:0]
            self.message_log.append({**message, "token_ids": own})

    def add_rewards(self, rewards: Mapping[str, float]) -> None:
        """Add the rewards of one turn."""
        self.turn_rewards.append(dict(rewards))
        for name, value in rewards.items():
            self.reward_parts[name] = self.reward_parts.get(name, 0.0) + value
        self.reward = sum(self.reward_weights.get(name, 1.0) * value for name, value in self.reward_parts.items())

    def restart(self, prompt: Trajectory) -> None:
        """Go back to the prompt; counts as a retry.

        Args:
            prompt: a copy of this rollout from before it was run.
        """
        retries = self.retries + 1
        vars(self).update(vars(copy.deepcopy(prompt)))
        self.retries = retries

    def fail(self, headline: str, details: str) -> None:
        """End it as a row that could not be scored."""
        self.failure, self.failure_details = headline, details
        self.scored, self.done = False, True

    def conversation(self) -> list[Message]:
        """The messages for an environment, without tokens."""
        return [
            cast("Message", {key: message[key] for key in MESSAGE_KEYS if message.get(key) is not None})
            for message in self.message_log
        ]


def to_batch(trajectories: Sequence[Trajectory]) -> BatchedDataDict[Any]:
    """Rows [B, T] of finished rollouts with the keys for losses, logs and metrics, see `rl_core.data.schema`."""
    return BatchedDataDict(
        {
            "input_ids": _padded([row.token_ids() for row in trajectories], "input_ids"),
            "input_lengths": torch.tensor([row.num_tokens() for row in trajectories], dtype=torch.int64),
            "token_mask": _padded([_per_token(row, _is_sampled) for row in trajectories], "token_mask"),
            "generation_logprobs": _padded([_per_token(row, _sampled_logprobs) for row in trajectories], "generation_logprobs"),
            "sample_mask": torch.tensor([row.loss_multiplier * row.scored for row in trajectories], dtype=torch.float32),
            "rewards": torch.tensor([row.reward for row in trajectories], dtype=torch.float32),
            "reward_parts": [row.reward_parts for row in trajectories],
            "reward_weights": [dict(row.reward_weights) for row in trajectories],
            "scored": torch.tensor([row.scored for row in trajectories], dtype=torch.bool),
            "prompt_id": torch.tensor([row.ordinal for row in trajectories], dtype=torch.int64),
            "group_ids": torch.tensor([row.group_id for row in trajectories], dtype=torch.int64),
            "token_versions": _padded([_per_token(row, _version) for row in trajectories], "token_versions"),
            "weight_version": torch.tensor([row.weight_version for row in trajectories], dtype=torch.int64),
            "truncated": torch.tensor([row.truncated for row in trajectories], dtype=torch.bool),
            "idx": [row.index for row in trajectories],
            "task_name": [row.task_name for row in trajectories],
            "message_log": [row.message_log for row in trajectories],
            "extra_env_info": [row.metadata for row in trajectories],
        }
    )


def _per_token(row: Trajectory, of_message: Any) -> torch.Tensor:
    return torch.cat([of_message(message) for message in row.message_log])


def _is_sampled(message: Mapping[str, Any]) -> torch.Tensor:
    return torch.full((len(message["token_ids"]),), float("generation_logprobs" in message))


def _sampled_logprobs(message: Mapping[str, Any]) -> torch.Tensor:
    logprobs: torch.Tensor = message.get("generation_logprobs", torch.zeros(len(message["token_ids"])))
    return logprobs.float()


def _version(message: Mapping[str, Any]) -> torch.Tensor:
    return torch.full((len(message["token_ids"]),), message.get("weight_version", -1), dtype=torch.int64)


def _padded(rows: list[torch.Tensor], key: str) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_value(key))
