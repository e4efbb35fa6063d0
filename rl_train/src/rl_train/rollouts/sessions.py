"""One rollout's view of the environment: its steps, and its session if the environment keeps state between them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from rl_core.environments.scorer import StepResult
from rl_core.errors import DataError, WorkerDiedError
from rl_core.interfaces.environment import SESSION_KEY, EnvironmentInterface
from rl_core.interfaces.records import Message, Observation
from rl_core.testing.outputs.environment import checked_observation
from rl_train.pools.pool import ActorKey
from rl_train.rollouts.activity import ENVIRONMENT, RolloutActivity
from rl_train.rollouts.environment_pool import EnvironmentPool, RowFailedError, StepFailedError, may_be_retried
from rl_train.rollouts.trajectory import Trajectory

_CANCELLED = "CancelledError: something that the environment waited for was cancelled"
_log = logging.getLogger("rlcore")


class StepQueue:
    """Passes the steps of rollouts to one environment, as many calls at a time as it has workers.

    While all workers are busy, ready rows wait and then share calls. An environment with `max_concurrency` above 1 gets a call
    per row. A row of a session only shares calls with rows of the same worker.

    Args:
        environment: a pool, or an environment in this process, whose calls block.
        task_name: named in errors.

    Attributes:
        keeps_sessions: whether the environment has sessions, see `rl_core.interfaces.environment.keeps_sessions`.
    """

    def __init__(self, environment: EnvironmentInterface, task_name: str) -> None:
        self.task_name = task_name
        self._environment = EnvironmentPool.of(environment, task_name)
        self.keeps_sessions = self._environment.keeps_sessions
        self._pool = self._environment.pool
        self._per_worker = self._pool.max_concurrency
        self._slots = self._pool.num_actors * self._per_worker
        self._waiting: defaultdict[ActorKey | None, deque[_Step]] = defaultdict(deque)
        """By worker; None if any may run them."""
        self._running: Counter[ActorKey | None] = Counter()
        self._sessions: Counter[ActorKey] = Counter()
        self._is_scheduled = False
        self._calls: set[asyncio.Task[None]] = set()

    async def step(
        self,
        rollout: Trajectory,
        conversation: list[Message],
        metadata: Any,
        *,
        alone: bool = False,
        worker: ActorKey | None = None,
    ) -> StepResult:
        """The environment's response; re-raises the call's exception.

        Args:
            rollout: the times in which the step waited and ran are added to it.
            conversation: the messages so far.
            metadata: state of the environment for this rollout.
            alone: do not share a call with other rows.
            worker: the worker of the session; None without one.
        """
        step = _Step(rollout, conversation, metadata, asyncio.get_running_loop().create_future(), alone, worker)
        self._waiting[worker].append(step)
        self._schedule()
        return await step.future

    def call(self, method: str, *args: Any, worker: ActorKey) -> asyncio.Future[Any]:
        """Call a method for one session."""
        return asyncio.wrap_future(self._pool.submit(method, *args, on=worker))

    def lease(self) -> ActorKey:
        """The worker with the fewest sessions.

        Raises:
            WorkerDiedError: there is none, because none could be started.
        """
        workers = self._pool.actors
        if not workers:
            raise WorkerDiedError(
                f"env.{self.task_name}: no process of the environment could be started. Its log shows why; `rlcore check env` "
                "runs the environment without a model."
            )
        worker = min(workers, key=lambda worker: self._sessions[worker])
        self._sessions[worker] += 1
        return worker

    def release(self, worker: ActorKey) -> None:
        """Release a session's worker."""
        self._sessions[worker] -= 1

    def _schedule(self) -> None:
        """Start calls once all rollouts that are ready now have added their rows."""
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._start_calls)

    def _start_calls(self) -> None:
        self._is_scheduled = False
        for worker, waiting in list(self._waiting.items()):
            free = (self._slots if worker is None else self._per_worker) - self._running[worker]
            for steps in self._take(waiting, free) if free > 0 else ():
                self._start(steps)
            if not waiting:
                del self._waiting[worker]

    def _take(self, waiting: deque[_Step], free: int) -> list[list[_Step]]:
        """Remove the rows of up to `free` calls from those that wait, and the cancelled ones that it comes across."""
        calls: list[list[_Step]] = []
        if self._per_worker > 1:  # reads only the rows that it starts, because thousands may wait
            while waiting and len(calls) < free:
                step = waiting.popleft()
                if not step.future.done():
                    calls.append([step])
            return calls
        ready = [step for step in waiting if not step.future.done()]
        shared = [step for step in ready if not step.alone]
        rows = max(-(-len(shared) // free), 1)
        calls = [shared[start : start + rows] for start in range(0, len(shared), rows)]
        calls += [[step] for step in ready if step.alone]
        waiting.clear()
        waiting.extend(step for steps in calls[free:] for step in steps)
        return calls[:free]

    def _start(self, steps: list[_Step]) -> None:
        self._running[steps[0].worker] += 1
        for step in steps:
            step.rollout.environment_wait_s += step.lap_s()
        call = asyncio.ensure_future(self._call(steps))
        self._calls.add(call)  # the event loop alone would not keep it alive
        call.add_done_callback(self._calls.discard)

    async def _call(self, steps: list[_Step]) -> None:
        """Call the environment with rows that share a call, and pass each row its result."""
        worker = steps[0].worker
        outcomes: list[StepResult | Exception]
        try:
            messages = [step.messages(with_tokens=self._environment.reads_token_ids) for step in steps]
            outcomes = [*await self._environment.step_rows(messages, [step.metadata for step in steps], on=worker)]
        except asyncio.CancelledError:  # it would end the rollouts as if they had been cancelled
            outcomes = [RowFailedError(_CANCELLED)] * len(steps)
        except Exception as error:
            if len(steps) > 1:
                error.add_note(f"{len(steps)} rows shared the call that failed; any of them may be the cause.")
            outcomes = [error] * len(steps)
        self._running[worker] -= 1
        for step, outcome in zip(steps, outcomes, strict=True):
            step.finish(outcome)
        self._schedule()


@dataclass(eq=False)
class _Step:
    rollout: Trajectory
    conversation: list[Message]
    metadata: Any
    future: asyncio.Future[StepResult]
    alone: bool
    worker: ActorKey | None
    since: float = field(default_factory=lambda: perf_counter())

    def messages(self, *, with_tokens: bool) -> list[Any]:
        """The conversation, on request with the `token_ids` of the model's message."""
        if not with_tokens:
            return self.conversation
        *before, last = self.conversation
        return [*before, {**last, "token_ids": self.rollout.message_log[-1]["token_ids"].tolist()}]

    def lap_s(self) -> float:
        """Seconds since the step was ready, or since the previous lap."""
        before, self.since = self.since, perf_counter()
        return self.since - before

    def finish(self, outcome: StepResult | Exception) -> None:
        """Pass the outcome on, unless the rollout does not wait for it any more."""
        if self.future.done():
            return
        self.rollout.environment_step_s += self.lap_s()
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        elif outcome.failure is not None:
            self.future.set_exception(RowFailedError(outcome.failure))
        else:
            self.future.set_result(outcome)


class Session:
    """One rollout's use of an environment.

    Args:
        steps: the queue of the environment.
        rollout: counts its repeated steps, and the time of all of them.
        activity: records what the rollout waits for.
        name: `session_id` of the rollout, if the environment keeps sessions.
        retries: how often a step that fails is repeated, without other rows in its call. Steps of sessions are not repeated,
            because the failed one may have changed their state. The steps of a rollout that has started again share no calls.
    """

    def __init__(
        self, steps: StepQueue, rollout: Trajectory, *, activity: RolloutActivity, name: str = "", retries: int = 0
    ) -> None:
        self._steps, self._rollout, self._name, self._activity = steps, rollout, name, activity
        self._retries = 0 if steps.keeps_sessions else retries
        self._worker: ActorKey | None = None

    async def open(self, metadata: Any) -> tuple[Any, Observation | None]:
        """Begin the session, if the environment keeps sessions.

        Args:
            metadata: the record's, a mapping or None.

        Returns:
            The metadata with `session_id`, and messages that are added to the prompt.

        Raises:
            StepFailedError: `reset` raised, its worker died or exceeded its timeout, or no worker could be started.
        """
        if not self._steps.keeps_sessions:
            return metadata, None
        if metadata is not None and not isinstance(metadata, Mapping):
            raise DataError(
                f"The environment of task {self._steps.task_name!r} keeps sessions, so the metadata of a row must be a "
                f"dictionary, found {type(metadata).__name__}."
            )
        metadata = {**(metadata or {}), SESSION_KEY: self._name}
        try:
            self._worker = self._steps.lease()
            with self._activity.waiting(ENVIRONMENT, "reset"):
                observation = await self._steps.call("reset", metadata, worker=self._worker)
        except Exception as error:
            raise _failed(error) from error
        return metadata, None if observation is None else checked_observation(observation, task_name=self._steps.task_name)

    async def step(self, conversation: list[Message], metadata: Any) -> StepResult:
        """Respond to one turn.

        Args:
            conversation: the messages so far; the last one is the model's.
            metadata: state of the environment for this rollout.

        Raises:
            StepFailedError: in every attempt, the environment raised, reported that this row failed, its worker died, or the
                timeout expired.
        """
        if self._worker is not None:
            metadata = {**metadata, SESSION_KEY: self._name}
        for attempt in range(self._retries + 1):
            alone = attempt > 0 or self._rollout.restarts > 0
            try:
                with self._activity.waiting(ENVIRONMENT, "step"):
                    return await self._steps.step(self._rollout, conversation, metadata, alone=alone, worker=self._worker)
            except Exception as error:
                if attempt == self._retries or not may_be_retried(error):
                    raise _failed(error) from error
                self._rollout.retries += 1
        raise AssertionError("unreachable")

    def close(self) -> asyncio.Future[Any] | None:
        """End the session, if one was begun; returns the pending call. Its errors are logged."""
        worker, self._worker = self._worker, None
        if worker is None:
            return None
        self._steps.release(worker)
        ended = self._steps.call("close", self._name, worker=worker)
        ended.add_done_callback(self._log_error)
        return ended

    def _log_error(self, ended: asyncio.Future[Any]) -> None:
        error = None if ended.cancelled() else ended.exception()
        if error is not None and not isinstance(error, WorkerDiedError):  # the session has ended with its worker
            _log.warning("env.%s: close() failed for session %s: %s", self._steps.task_name, self._name, error)


def _failed(error: Exception) -> Exception:
    return StepFailedError(error) if may_be_retried(error) else error
