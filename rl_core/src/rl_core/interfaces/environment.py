"""What answers and scores: message logs in, observations and rewards out; a plain class, no Ray needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from rl_core.data.batched_data_dict import BatchedDataDict

Message = dict[str, str]
"""`role` and `content`."""


class EnvironmentReturn(NamedTuple):
    """The answer of an environment to one turn of a batch; row i answers row i."""

    observations: list[Message]
    """What the model reads next; ignored where the row has terminated."""
    metadata: list[Any]
    """The state that `step` gets back at the next turn; None ends it."""
    next_stop_strings: list[list[str] | None]
    """Stop strings of the next turn."""
    rewards: torch.Tensor | Mapping[str, torch.Tensor]
    """[B] float32, or named parts of that form; the parts are summed. A call may leave out a name that other calls return: its
    rows then have 0.0 for it. A plain tensor counts as the part `reward`."""
    terminateds: torch.Tensor
    """[B], non-zero where the row has ended."""
    answers: list[str | None] | None = None
    """What was read as the row's final answer."""


class EnvironmentInterface(ABC):
    """Scores completions and plays the other side of a conversation.

    The core runs an environment as a pool of processes; instances do not share state, so what a row must remember
    travels in its metadata.
    """

    @abstractmethod
    def step(self, message_log_batch: list[list[Message]], metadata: list[Any]) -> EnvironmentReturn:
        """Answer one turn.

        Args:
            message_log_batch: B conversations so far, the last message being the model's.
            metadata: B states; at the first turn the record's `extra_env_info`.
        """

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        """Metrics over all rows of this environment's tasks in a step.

        Args:
            batch: `rewards`, `truncated`, `message_log` (role and content), `extra_env_info`, `answers`, `task_name`, `idx`.
        """
        return batch, {}

    def shutdown(self) -> None:
        """Release processes and files; calling it twice is fine."""
        return None
