"""Compares answers with `expected_answer`, by an installed environment."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from rl_core.config.schema import EnvironmentConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import DataError, RLCoreError
from rl_core.interfaces.environment import EnvironmentInterface
from rl_core.plugins.component import Kind
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_core.testing.outputs.environment import metrics_checked, step_checked
from rl_serve.errors import ApiError
from rl_train.config.schema import section_of

_log = logging.getLogger(__name__)


class Grader:
    """Grades single-turn answers with an environment that reports `accuracy`, such as `math`.

    Args:
        name: a registered environment, or the path of a class; it is created for the first answer. With `section`, the task.
        section: the section of a run's environment; by default the one of `name` with its defaults.

    Raises:
        UserError: there is no such environment.
    """

    def __init__(self, name: str, section: EnvironmentConfig | None = None) -> None:
        from rl_train.workbench.instances import environment_factory  # imports Ray, which not every server needs

        self.name = name
        registry = Registry(discover())
        if section is None:
            section = cast(EnvironmentConfig, section_of(registry.find(Kind.ENVIRONMENT, name), Kind.ENVIRONMENT)())
        self._make, _ = environment_factory(name, section, registry)
        self._environment: EnvironmentInterface | None = None
        self._turn = asyncio.Lock()

    async def grade(self, messages: Sequence[Mapping[str, Any]], answer: str, record: Mapping[str, Any]) -> dict[str, Any]:
        """Grade an answer.

        Returns:
            `predicted_answer`, the final answer that was found in the text, and `is_correct`, None if it could not be scored.

        Args:
            messages: the prompt.
            answer: the text of the answer.
            record: the fields of the request, with `expected_answer`.

        Raises:
            ApiError: the environment does not accept the record, or failed.
        """
        log = [*messages, {"role": "assistant", "content": answer}]
        try:
            async with self._turn:  # an environment is not safe for threads
                return await asyncio.to_thread(self._grade, log, dict(record))
        except RLCoreError as error:
            if isinstance(error, DataError) or isinstance(error.__cause__, DataError):  # the cause, if raised elsewhere
                _log.warning("an answer could not be graded: %s", error)
                raise ApiError(
                    400,
                    f"The answer cannot be graded: the environment {self.name!r} needs other fields, or other values, than "
                    f"{', '.join(sorted(record))}. The server's log has the details.",
                    param="expected_answer",
                ) from error
            _log.exception("the environment failed")
            raise ApiError(
                503, f"The environment {self.name!r} failed. The server's log has the details.", code="grading_failed"
            ) from error

    def close(self) -> None:
        """Shut the environment down."""
        if self._environment is not None:
            self._environment.shutdown()

    def _grade(self, log: list[Any], record: dict[str, Any]) -> dict[str, Any]:
        if self._environment is None:
            self._environment = self._make()
        [result] = step_checked(self._environment, self.name, [log], [record])
        if not result.scored:
            return {"predicted_answer": result.answer, "is_correct": None}
        batch: BatchedDataDict[Any] = BatchedDataDict(
            {
                "rewards": torch.tensor([sum(result.rewards.values())], dtype=torch.float32),
                "truncated": torch.tensor([False]),
                "message_log": [log],
                "extra_env_info": [result.metadata],
                "answers": [result.answer],
                "task_name": [self.name],
                "idx": [0],
            }
        )
        accuracy = metrics_checked(self._environment, self.name, batch).get("accuracy")
        return {"predicted_answer": result.answer, "is_correct": None if accuracy is None else accuracy == 1.0}
