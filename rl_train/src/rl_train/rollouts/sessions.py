"""The environment as one rollout sees it. Steps of rollouts that are ready at the same moment share a call."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rl_core.interfaces.environment import EnvironmentInterface, EnvironmentReturn
from rl_core.interfaces.environment_checks import step_checked
from rl_core.interfaces.messages import Message, Observation
from rl_train.rollouts.environment_pool import EnvironmentPool
from rl_train.rollouts.failures import StepFailedError, may_be_retried


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """An environment's response to one turn of one rollout."""

    observation: Observation
    """What the model reads next; ignored if `terminated`."""
    metadata: Any
    """State passed to the next step; None keeps the previous one."""
    stop_strings: list[str] | None
    """Stop strings of the next turn."""
    rewards: Mapping[str, float]
    """Rewards of this turn by name; `reward` if the environment returns only one."""
    terminated: bool
    answer: str | None
    scored: bool
    """Whether the environment could score this turn."""


class StepQueue:
    """Passes the steps of rollouts to one environment, as many calls at a time as it has workers.

    While all workers are busy, ready rows wait and then share calls. An environment with `max_concurrency` above 1 gets a call
    per row.

    Args:
        environment: a pool, or an environment in this process, whose calls block.
        task_name: named in errors.
    """

    def __init__(self, environment: EnvironmentInterface, task_name: str) -> None:
        self._environment, self._task_name = environment, task_name
        self._slots, self._one_row_per_call = 1, False
        if isinstance(environment, EnvironmentPool):
            self._slots, self._one_row_per_call = environment.slots, environment.max_concurrency > 1
        self._waiting: list[_Step] = []
        self._running = 0
        self._is_scheduled = False

    async def step(self, conversation: list[Message], metadata: Any, *, alone: bool = False) -> StepResult:
        """The environment's response; raises what the call raised.

        Args:
            conversation: the messages so far.
            metadata: state of the environment for this rollout.
            alone: do not share a call with other rows.
        """
        step = _Step(conversation, metadata, asyncio.get_running_loop().create_future(), alone)
        self._waiting.append(step)
        self._schedule()
        return await step.future

    def _schedule(self) -> None:
        """Start calls once all rollouts that are ready now have added their rows."""
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._start_calls)

    def _start_calls(self) -> None:
        self._is_scheduled = False
        self._waiting = [step for step in self._waiting if not step.future.done()]  # others were cancelled
        free = self._slots - self._running
        if not self._waiting or not free:
            return
        shared = [] if self._one_row_per_call else [step for step in self._waiting if not step.alone]
        rows = -(-len(shared) // free) if shared else 1
        calls = [shared[start : start + rows] for start in range(0, len(shared), rows)]
        calls += [[step] for step in self._waiting if self._one_row_per_call or step.alone]
        self._waiting = [step for call in calls[free:] for step in call]
        for steps in calls[:free]:
            self._start(steps)

    def _start(self, steps: list[_Step]) -> None:
        self._running += 1
        loop = asyncio.get_running_loop()
        call = self._call([step.conversation for step in steps], [step.metadata for step in steps])
        asyncio.wrap_future(call, loop=loop).add_done_callback(lambda ended: self._finish(steps, ended))

    def _finish(self, steps: list[_Step], ended: asyncio.Future[EnvironmentReturn]) -> None:
        self._running -= 1
        error = None if ended.cancelled() else ended.exception()
        for row, step in enumerate(steps):
            if step.future.done():
                continue
            if ended.cancelled():
                step.future.cancel()
            elif error is not None:
                step.future.set_exception(error)
            else:
                step.future.set_result(_result(ended.result(), row))
        self._schedule()

    def _call(self, conversations: list[list[Message]], metadata: list[Any]) -> Future[EnvironmentReturn]:
        if isinstance(self._environment, EnvironmentPool):
            return self._environment.submit_step(conversations, metadata)
        future: Future[EnvironmentReturn] = Future()
        try:
            future.set_result(step_checked(self._environment, self._task_name, conversations, metadata))
        except Exception as error:
            future.set_exception(error)
        return future


@dataclass(eq=False)
class _Step:
    conversation: list[Message]
    metadata: Any
    future: asyncio.Future[StepResult]
    alone: bool


class Session:
    """One rollout's use of an environment.

    Args:
        steps: the queue of the environment.
        retries: how often a step that fails is repeated, without other rows in its call.

    Attributes:
        repeated: Number of repeated steps.
    """

    def __init__(self, steps: StepQueue, *, retries: int = 0) -> None:
        self._steps, self._retries = steps, retries
        self.repeated = 0

    async def step(self, conversation: list[Message], metadata: Any) -> StepResult:
        """Respond to one turn.

        Args:
            conversation: the messages so far; the last one is the model's.
            metadata: state of the environment for this rollout.

        Raises:
            StepFailedError: the environment raised, its worker died or exceeded its timeout, in every attempt.
        """
        for attempt in range(self._retries + 1):
            try:
                return await self._steps.step(conversation, metadata, alone=attempt > 0)
            except Exception as error:
                if not may_be_retried(error):
                    raise
                if attempt == self._retries:
                    raise StepFailedError(error) from error
                self.repeated += 1
        raise AssertionError("unreachable")


def _result(found: EnvironmentReturn, row: int) -> StepResult:
    rewards: Mapping[str, Sequence[Any]] = found.rewards if isinstance(found.rewards, Mapping) else {"reward": found.rewards}
    return StepResult(
        observation=found.observations[row],
        metadata=found.metadata[row],
        stop_strings=found.next_stop_strings[row],
        rewards={name: float(values[row]) for name, values in rewards.items()},
        terminated=bool(found.terminateds[row]),
        answer=found.answers[row] if found.answers is not None else None,
        scored=found.scored is None or bool(found.scored[row]),
    )
