"""Environments: message logs in, observations and rewards out. A plain class; no Ray needed."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from rl_core.errors import DataError
from rl_core.interfaces.generation import GenerationOutputSpec
from rl_core.interfaces.private_names import PrivateNames
from rl_core.interfaces.records import Message as Message
from rl_core.interfaces.records import Observation, ToolSpec

if TYPE_CHECKING:
    from rl_core.data.batched_data_dict import BatchedDataDict

Conversation = list[Any]
"""Messages, see `rl_core.interfaces.records.Message`. Untyped, so that an environment may annotate `list[dict[str, str]]`."""

SESSION_KEY = "session_id"
"""Metadata key of the name of a rollout's session."""


class EnvironmentReturn(NamedTuple):
    """An environment's response to one turn of a batch; row i responds to conversation i."""

    observations: Sequence[Observation]
    """What the model reads next: a message (`role` and `content`), or a list of several. Ignored if the row has terminated."""
    metadata: list[Any]
    """State passed to `step` at the next turn."""
    next_stop_strings: list[list[str] | None]
    """Stop strings of the next turn."""
    rewards: torch.Tensor | Mapping[str, torch.Tensor]
    """[B] float32, or named components of that form, which are summed. A call may omit a name that other calls return: its
    rows then get 0.0 for it. If a scored row ends, there is at least one. A plain tensor is the component `reward`."""
    terminateds: torch.Tensor
    """[B], 1 (or True) if the row has ended, else 0."""
    answers: list[str | None] | None = None
    """The final answer parsed from each row, as text; None if there is none, or for all rows."""
    scored: torch.Tensor | None = None
    """[B], 0 if this turn of the row could not be scored; None if all were. A rollout with such a turn counts neither in the
    statistics of its group nor in the loss."""
    failures: list[str | None] | None = None
    """Why a row could not be answered for a reason that is not the model's, such as a dead service; None for other rows, or
    for all. Only the steps of such rows are repeated, as if they had raised; a row that fails every time is not scored."""


class EnvironmentInterface(PrivateNames, ABC):
    """Scores completions and plays the other side of a conversation.

    An environment runs as a pool of processes that share no state, so what must be remembered about a row belongs in its
    metadata, or in a session (`reset`).
    """

    min_turns: ClassVar[int] = 1
    """Number of turns without which the environment cannot give a reward. A config that allows fewer is refused. Write it as a
    number in the class body, so that `rlcore validate` can read it without importing the module."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Add an explanation to calls of `step` without metadata, which would raise a bare TypeError."""
        super().__init_subclass__(**kwargs)
        own = cls.__dict__.get("step")
        if inspect.isfunction(own) and not getattr(own, "__isabstractmethod__", False):
            cls.step = _with_arguments_checked(own)  # type: ignore[method-assign]

    reads_tool_calls: ClassVar[bool] = False
    """Whether the model's messages are parsed for tool calls: a message then has `tool_calls` if the model made some. Messages
    of environments that offer tools are always parsed."""

    @classmethod
    def offered_tools(cls, config: Any = None) -> list[ToolSpec]:
        """The functions that the chat template shows in every row of this environment's tasks.

        A row that has `tools` is shown only those; each must be one of these functions. Called in the main process, without
        an instance.

        Args:
            config: As in the constructor.
        """
        return []

    @abstractmethod
    def step(self, message_log_batch: list[Conversation], metadata: list[Any]) -> EnvironmentReturn:
        """Respond to one turn.

        Args:
            message_log_batch: B conversations so far; the last message is the model's. A message has `role` and `content`, the
                text, and optionally `tool_calls`, `tool_call_id` and `name`.
            metadata: B states; at the first turn the record's `extra_env_info`.

        Also takes the output of an engine for rows of text, instead of the two lists: their `messages`, and as states their
        `extra_env_info` or, without it, their other columns.

        The runtime checks the return value: a wrong type, a number of entries other than B, a reward that is not finite, or
        invalid Unicode ends the run with an error that names task and class.
        """

    def reset(self, metadata: dict[str, Any]) -> Observation | None:
        """Begin a session: the state of one rollout, kept by this object between its steps. Optional.

        If a class overrides this method or `close`, all calls of a rollout run in the same process, and its metadata have the
        name of the session as `session_id`, in `step` too. If the process dies, the rollout starts again in another session.

        Args:
            metadata: the record's `extra_env_info`, and `session_id`.

        Returns:
            Messages that are added to the prompt, or None.
        """
        return None

    def close(self, session: str) -> None:
        """End a session. Called for every session whose process lives, also if its rollout was truncated or failed.

        Args:
            session: its `session_id`; `reset` may have failed for it.
        """
        return None

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        """Compute metrics over all rows of this environment's tasks in a step.

        Args:
            batch: `rewards`, `truncated`, `message_log` (role and content), `extra_env_info`, `answers`, `task_name`, `idx`.

        Returns:
            The batch, and numbers by name; `accuracy` is averaged over tasks as `rollout/accuracy`.
        """
        return batch, {}

    def shutdown(self) -> None:
        """Release processes and files; calling it twice is fine."""
        return None


def keeps_sessions(environment_class: type) -> bool:
    """Whether a class overrides `reset` or `close` of `EnvironmentInterface`."""
    base = EnvironmentInterface
    return issubclass(environment_class, base) and (
        environment_class.reset is not base.reset or environment_class.close is not base.close
    )


def _with_arguments_checked(step: Callable[..., EnvironmentReturn]) -> Callable[..., EnvironmentReturn]:
    @functools.wraps(step)
    def checked(self: EnvironmentInterface, *args: Any, **kwargs: Any) -> EnvironmentReturn:
        given = [*args, *kwargs.values()]
        if len(given) == 1 and isinstance(given[0], Mapping) and "messages" in given[0]:
            return step(self, list(given[0]["messages"]), _metadata(given[0]))
        if len(given) < 2:
            received = ", ".join(type(value).__name__ for value in given) or "nothing"
            raise DataError(
                f"{type(self).__name__}.step takes B conversations (lists of messages with `role` and `content`) and B "
                f"metadata objects, found {received}. A generation has both if its prompts had a column `messages`, `prompt` "
                "or `question`."
            )
        return step(self, *args, **kwargs)

    return checked


def _metadata(generation: Mapping[str, Any]) -> list[Any]:
    """The states of the rows of a generation: `extra_env_info`, or the lists among its columns, which came with the prompts."""
    if "extra_env_info" in generation:
        return list(generation["extra_env_info"])
    outputs = GenerationOutputSpec.__annotations__
    columns = {key: values for key, values in generation.items() if isinstance(values, list) and key not in outputs}
    return [{key: values[row] for key, values in columns.items()} for row in range(len(generation["messages"]))]
