"""Rollouts of an environment in this process whose answers come from the caller, not from a model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rl_core.environments.step_results import StepResult
from rl_core.event_loop import finished
from rl_core.interfaces.environment import SESSION_KEY, EnvironmentInterface, keeps_sessions
from rl_core.interfaces.messages import messages_of
from rl_core.testing.environments.trial import TrialRow
from rl_core.testing.outputs.environment import checked_observation, step_checked


class LocalRollouts:
    """B rollouts, which are stepped together. Their sessions, if the environment keeps any, are open within a `with` block.

    Args:
        environment: an instance in this process.
        task: task name, for errors.
        rows: B prompts and their metadata.
        session: beginning of the name of each session.

    Attributes:
        logs: the conversation of each rollout so far.
        metadata: the environment's state for each rollout.
        ended: which rollouts the environment has ended.
    """

    def __init__(self, environment: EnvironmentInterface, task: str, rows: Sequence[TrialRow], *, session: str) -> None:
        self._environment, self._task = environment, task
        self._sessions = [f"{session}-{row}" for row in range(len(rows))] if keeps_sessions(type(environment)) else []
        self.logs: list[list[Any]] = [copy.deepcopy(list(row.messages)) for row in rows]
        self.metadata: list[Any] = [copy.deepcopy(row.metadata) for row in rows]
        self.ended = [False] * len(rows)

    def __enter__(self) -> Self:
        try:
            for row, name in enumerate(self._sessions):
                self.metadata[row] = (self.metadata[row] or {}) | {SESSION_KEY: name}
                observation = finished(self._environment.reset(self.metadata[row]))
                if observation is not None:
                    self.logs[row] += messages_of(checked_observation(observation, task_name=self._task))
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()

    def answer(self, answers: Mapping[int, str], **fields: Any) -> dict[int, StepResult]:
        """Add an answer to some of the rollouts, by their index; returns the environment's response to each.

        Args:
            answers: the texts.
            fields: further fields of each message.
        """
        return self.step(
            {row: [*self.logs[row], {"role": "assistant", "content": text, **fields}] for row, text in answers.items()}
        )

    def step(self, logs: Mapping[int, list[Any]]) -> dict[int, StepResult]:
        """Replace the conversations of some of the rollouts, which end with answers; returns the environment's responses."""
        if not logs:
            return {}
        self.logs = [logs.get(row, log) for row, log in enumerate(self.logs)]
        metadata = [self._with_session(row) for row in logs]
        results = step_checked(self._environment, self._task, copy.deepcopy([*logs.values()]), metadata)
        for row, result in zip(logs, results, strict=True):
            self.ended[row] = result.terminated
            if result.metadata is not None:
                self.metadata[row] = result.metadata
            if not result.terminated:
                self.logs[row] = [*self.logs[row], *messages_of(result.observation)]
        return dict(zip(logs, results, strict=True))

    def _with_session(self, row: int) -> Any:
        return self.metadata[row] | {SESSION_KEY: self._sessions[row]} if self._sessions else self.metadata[row]

    def _close(self) -> None:
        close: Any = self._environment.close  # which may be async
        for name in self._sessions:
            finished(close(name))
