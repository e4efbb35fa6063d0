"""Environments that score one answer per rollout, and the results of a step: one per row, or as an `EnvironmentReturn`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

import torch

from rl_core.config.schema import EnvironmentConfig
from rl_core.config.validator import read_section
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import DataError, UserError, format_value
from rl_core.interfaces.environment import Conversation, EnvironmentInterface, EnvironmentReturn
from rl_core.interfaces.records import Observation

FACTS_KEY = "score_facts"
"""Metadata key of the facts of an answer."""


@dataclass(frozen=True)
class Score:
    """How good an answer is."""

    reward: float | Mapping[str, float]
    """The reward, or named rewards, which are summed."""
    facts: Mapping[str, float | Sequence[float]] = field(default_factory=dict)
    """What to report, by the name of its metric: a number (or True or False), or several. The metric is their mean over all
    scored answers; `accuracy` is also averaged over tasks, as `rollout/accuracy`."""
    _: KW_ONLY
    answer: str | None = None
    """The final answer that was found in the text."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Added to the metadata of the row."""
    reply: str = ""
    """Shown by `rlcore env play`. The model does not read it, because the rollout has ended."""
    scored: bool = True
    """Whether the answer could be scored; if not, it counts neither in the statistics of its group nor in the loss."""
    failure: str | None = None
    """Why the answer could not be scored for a reason that is not the model's, such as a dead service: the step is repeated."""


class ScorerEnvironment(EnvironmentInterface):
    """Scores one answer per rollout; every rollout ends after its first turn.

    A subclass implements `score`, or `score_batch` if answers are scored together, for example by concurrent requests.

    Args:
        config: A section of the class `config_class`, a dict of its keys, or None for its defaults.

    Raises:
        ConfigError: A key is unknown or a value is not allowed.
    """

    config_class: ClassVar[type[EnvironmentConfig]] = EnvironmentConfig
    """The model of the section in `env`."""

    def __init__(self, config: EnvironmentConfig | Mapping[str, Any] | None = None) -> None:
        self.config = read_section(self.config_class, config)

    def score(self, text: str, info: Mapping[str, Any]) -> Score:
        """Score one answer.

        Args:
            text: The model's message after the last `</think>`; empty if it ended while the model was thinking.
            info: The metadata of the row: `expected_answer`, and the fields that `env_keys` of the dataset names.

        Raises:
            DataError: The metadata cannot be used; the error then begins with the row.
        """
        raise NotImplementedError(f"{type(self).__name__} implements neither `score` nor `score_batch`.")

    def score_batch(self, message_log_batch: list[Conversation], metadata: list[Any]) -> Sequence[Score]:
        """Score B answers; by default, each one with `score`.

        Args:
            message_log_batch: B conversations, whose last messages are the answers.
            metadata: B objects, mappings or None.
        """
        rows = zip(message_log_batch, metadata, strict=True)
        return [self._score_row(row, str(log[-1]["content"]), info) for row, (log, info) in enumerate(rows)]

    def step(self, message_log_batch: list[Conversation], metadata: list[Any]) -> EnvironmentReturn:
        """Score B conversations by their last message; every row ends."""
        scores = self.score_batch(message_log_batch, metadata)
        if len(scores) != len(metadata):
            raise UserError(f"{type(self).__name__}.score_batch returned {len(scores)} scores for {len(metadata)} answers.")
        if wrong := [one for one in scores if not isinstance(one, Score)]:
            raise UserError(f"{type(self).__name__} returned {format_value(wrong[0])} for an answer. Return Score(reward).")
        return environment_return([_result(score, info) for score, info in zip(scores, metadata, strict=True)])

    def global_post_process_and_metrics(
        self, batch: BatchedDataDict[Any]
    ) -> tuple[BatchedDataDict[Any], dict[str, float | int]]:
        """The mean of each fact over the rows that have it."""
        numbers: defaultdict[str, list[float]] = defaultdict(list)
        for info in batch["extra_env_info"]:
            for name, value in (info or {}).get(FACTS_KEY, {}).items():
                numbers[name] += value if isinstance(value, Sequence) else [value]
        return batch, {name: sum(values) / len(values) for name, values in numbers.items() if values}

    def _score_row(self, row: int, completion: str, info: Any) -> Score:
        if not isinstance(info, Mapping | None):
            raise DataError(f"Row {row}: the metadata of {type(self).__name__} must be a mapping, found {format_value(info)}.")
        try:
            return self.score(final_text(completion), {} if info is None else info)
        except DataError as error:
            raise DataError(f"Row {row}: {error}") from error


def _result(score: Score, info: Any) -> StepResult:
    added = {**score.metadata, FACTS_KEY: dict(score.facts)} if score.facts else score.metadata
    return StepResult(
        observation={"role": "environment", "content": score.reply},
        metadata={**(info or {}), **added} if added else info,
        rewards=named_rewards(score.reward),
        terminated=True,
        answer=score.answer,
        scored=score.scored,
        failure=score.failure,
    )


_OPENING, _CLOSING = "<think>", "</think>"


def final_text(completion: str) -> str:
    """The text after the last `</think>`: the answer without the reasoning.

    The opening tag may be missing, because many chat templates write it in the prompt. If a `<think>` is not closed, the
    completion ended while the model was thinking, so there is no answer: the result is empty. A completion without tags is
    returned as it is.
    """
    text = completion.rpartition(_CLOSING)[2]
    return "" if _OPENING in text else text


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """An environment's response to one turn of one rollout."""

    observation: Observation
    """What the model reads next; ignored if `terminated`."""
    metadata: Any
    """State passed to the next step; None keeps the previous one."""
    rewards: Mapping[str, float]
    """Rewards of this turn by name; `reward` if the environment returns only one."""
    terminated: bool
    stop_strings: list[str] | None = None
    """Stop strings of the next turn."""
    answer: str | None = None
    """The final answer parsed from the row, as text; None if there is none."""
    scored: bool = True
    """Whether the environment could score this turn."""
    failure: str | None = None
    """Why the row could not be answered for a reason that is not the model's; such a row is not scored."""


def named_rewards(rewards: Any) -> Mapping[str, Any]:
    """Rewards by name, of a row or of a batch: rewards without names are `reward`."""
    return rewards if isinstance(rewards, Mapping) else {"reward": rewards}


def step_results(step_return: EnvironmentReturn) -> list[StepResult]:
    """The result of each row."""
    rewards = {name: torch.as_tensor(values).tolist() for name, values in named_rewards(step_return.rewards).items()}
    rows = len(step_return.observations)
    answers, failures = step_return.answers or [None] * rows, step_return.failures or [None] * rows
    return [
        StepResult(
            observation=step_return.observations[row],
            metadata=step_return.metadata[row],
            rewards={name: float(values[row]) for name, values in rewards.items()},
            terminated=bool(ended),
            stop_strings=step_return.next_stop_strings[row],
            answer=answers[row],
            scored=(step_return.scored is None or bool(step_return.scored[row])) and failures[row] is None,
            failure=failures[row],
        )
        for row, ended in enumerate(torch.as_tensor(step_return.terminateds).tolist())
    ]


def environment_return(results: Sequence[StepResult]) -> EnvironmentReturn:
    """The return value of `EnvironmentInterface.step`; a row without a reward that others have gets 0.0 for it."""
    names = dict.fromkeys(name for result in results for name in result.rewards) if results else ["reward"]
    rewards: dict[str, Any] = {name: [result.rewards.get(name, 0.0) for result in results] for name in names}
    with suppress(TypeError, ValueError, RuntimeError, OverflowError):  # the check of the response names the wrong value
        rewards = {name: torch.tensor(values, dtype=torch.float32) for name, values in rewards.items()}
    return EnvironmentReturn(
        observations=[result.observation for result in results],
        metadata=[result.metadata for result in results],
        next_stop_strings=[result.stop_strings for result in results],
        rewards=rewards["reward"] if list(rewards) == ["reward"] else rewards,
        terminateds=torch.tensor([result.terminated for result in results], dtype=torch.float32),
        answers=[result.answer for result in results],
        scored=torch.tensor([result.scored and result.failure is None for result in results], dtype=torch.bool),
        failures=[result.failure for result in results],
    )
