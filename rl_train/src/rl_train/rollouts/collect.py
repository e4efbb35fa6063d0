"""Runs rollouts concurrently: one coroutine per rollout, so that none waits for the turns of others."""

from __future__ import annotations

import asyncio
import copy
import logging
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from rl_core.errors import ConfigError, RLCoreError
from rl_core.interfaces.environment import EnvironmentInterface
from rl_core.interfaces.generation import GenerationInterface
from rl_train.rollouts.activity import ActivityLog, RolloutActivity
from rl_train.rollouts.drivers import EnvironmentDriver, RolloutDriver
from rl_train.rollouts.engines import BatchSampler, RolloutSampler, RowSampler, TurnSampler
from rl_train.rollouts.failures import RolloutTimeoutError, StepFailedError
from rl_train.rollouts.loop import RolloutLoop
from rl_train.rollouts.seeds import SampleStream
from rl_train.rollouts.sessions import Session, StepQueue
from rl_train.rollouts.trajectory import Trajectory
from rl_train.tools.parsers import ToolCallParser

_log = logging.getLogger("rlcore")


@dataclass(frozen=True, kw_only=True)
class Collector:
    """Plays rollouts to their end.

    Attributes:
        generation: the engine.
        environments: by task name; without any, a rollout is one answer without a reward.
        tokenizer: decodes what the environments read.
        seed: seed of the run.
        max_turns: maximum number of turns of a rollout, by task name.
        max_total_length: maximum number of tokens of a segment; a rollout that reaches it is truncated.
        reward_weights: weights of named rewards that are not 1, by task name.
        retries: how often a step that an environment fails to respond to is repeated.
        tool_parsers: parsers of tool calls, by task name; messages of other tasks are not parsed.
        history: `rollout.history`.
        drivers: drivers of tasks that are not run in turns of model and environment, by task name.
        row_by_row: whether rollouts of one turn are also sampled row by row, so that they can begin and end at any time.
        timeout_s: `rollout.timeout_s`.
        loop: the event loop of all rollouts.
        activities: what the rollouts in progress wait for.
        deadline_s: maximum time in seconds in which no rollout continues while a thread waits for them.
        process: begins the names of sessions, because a resumed run plays rollouts again that a killed one had begun.
    """

    generation: GenerationInterface
    environments: Mapping[str, EnvironmentInterface]
    tokenizer: Any
    seed: int
    max_turns: Mapping[str, int]
    max_total_length: int
    reward_weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    retries: int = 0
    tool_parsers: Mapping[str, ToolCallParser] = field(default_factory=dict)
    history: str = "as_sampled"
    drivers: Mapping[str, RolloutDriver] = field(default_factory=dict)
    row_by_row: bool = False
    timeout_s: float | None = None
    loop: RolloutLoop = field(default_factory=RolloutLoop)
    activities: ActivityLog = field(default_factory=ActivityLog)
    deadline_s: float = 3600.0
    process: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    def collect(self, trajectories: Sequence[Trajectory], *, stream: SampleStream, greedy: bool = False) -> None:
        """Run `trajectories` to their end, in place.

        Rollouts of several turns are sampled row by row. Rollouts of one turn, and those of an engine without `generate_async`,
        are sampled in complete batches, unless `row_by_row` is set. A rollout whose environment fails, also when the step is
        repeated, ends without a score (`Trajectory.failure`).

        Args:
            trajectories: rollouts with only their prompts.
            stream: training or validation; part of the seeds, together with prompt ordinal, sample and turn.
            greedy: use greedy decoding.
        """
        self.generation.prepare_for_generation()
        self.loop.run(self.play(trajectories, stream=stream, greedy=greedy), meanwhile=self.generation.await_weights)

    def _check(self, trajectories: Sequence[Trajectory]) -> None:
        unknown = {row.task_name for row in trajectories} - set(self.environments)
        if unknown and self.environments:
            raise ConfigError(
                f"The data has the tasks {sorted(unknown)}, but `env` only has {sorted(self.environments)}. "
                "Add a section env.<task> for each, or set data.train.task_name."
            )
        if any(row.prefill and (self.generation.reads_messages or row.task_name in self.drivers) for row in trajectories):
            raise ConfigError(
                "A prompt ends with the beginning of the answer. Agents cannot continue it, and engines only if they take "
                "token ids (policy.generation.openai_cfg.api: completions). Use such an engine, or set "
                "continue_final_message: false."
            )
        if self.generation.reads_messages and any(row.tools for row in trajectories):
            raise ConfigError(
                f"{type(self.generation).__name__} sends messages without the tools of the environment, so the model "
                "would not know them. Use an endpoint that takes token ids (policy.generation.openai_cfg.api: completions)."
            )

    @cached_property
    def _queues(self) -> Mapping[str, StepQueue]:
        return {task: StepQueue(environment, task) for task, environment in self.environments.items()}

    @cached_property
    def _driver(self) -> EnvironmentDriver:
        return EnvironmentDriver(
            self.tokenizer,
            max_turns={task: turns for task, turns in self.max_turns.items() if task not in self.drivers},
            max_total_length=self.max_total_length,
            tool_parsers=self.tool_parsers,
            history=self.history,
        )

    async def play(self, trajectories: Sequence[Trajectory], *, stream: SampleStream, greedy: bool = False) -> None:
        """Run `trajectories` to their end in `loop`, while the engine is prepared; arguments as `collect`."""
        self._check(trajectories)
        for row in trajectories:
            row.reward_weights = self.reward_weights.get(row.task_name, {})
        sampler = self._sampler(len(trajectories), greedy)

        async def play(position: int, row: Trajectory) -> None:
            driver = self.drivers.get(row.task_name, self._driver)
            name = f"{stream.name.lower()} prompt {row.ordinal}, sample {row.sample}, task {row.task_name}"
            try:
                with self.activities.follow(name, driver=type(driver).__name__) as activity, self.activities.listed_in_errors():
                    engine = RolloutSampler(
                        sampler,
                        run_seed=self.seed,
                        stream=stream,
                        ordinal=row.ordinal,
                        sample=row.sample,
                        position=position,
                        activity=activity,
                    )
                    await self._play_one(row, driver, engine, activity)
            finally:
                sampler.rollout_ended(position)

        rollouts = gather_or_cancel([play(position, row) for position, row in enumerate(trajectories)])
        await self.activities.watch(rollouts, self.deadline_s, lambda: self.loop.awaited_since)

    async def _play_one(
        self, row: Trajectory, driver: RolloutDriver, engine: RolloutSampler, activity: RolloutActivity
    ) -> None:
        queue, start = self._queues.get(row.task_name), engine.name
        keeps_sessions = queue is not None and queue.keeps_sessions
        prompt = copy.deepcopy(row) if keeps_sessions or self.timeout_s is not None else None
        while True:
            session = None
            if queue is not None:
                name = f"{self.process}-{start}-{row.retries}"
                session = Session(queue, row, activity=activity, name=name, retries=self.retries)
            closing = None
            try:
                await self._run_in_time(driver.run(row, engine, session))
            except StepFailedError as error:
                # A session cannot be continued after a failure: the rollout starts again, in another session.
                repeats = keeps_sessions or isinstance(error.cause, RolloutTimeoutError)
                if prompt is not None and repeats and row.restarts < self.retries:
                    row.restart(prompt)
                    engine = engine.restarted()
                    continue
                row.fail(error.headline, str(error))
            finally:
                if session is not None:
                    closing = session.close()
            if closing is not None:
                await asyncio.wait([closing])
            return

    async def _run_in_time(self, rollout: Coroutine[Any, Any, Trajectory]) -> None:
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                await rollout
        except TimeoutError as error:
            if not limit.expired():
                raise
            late = RolloutTimeoutError(f"the rollout did not end within {self.timeout_s:g} s (rollout.timeout_s)")
            raise StepFailedError(late) from error

    @property
    def streams_rows(self) -> bool:
        """Whether rollouts are sampled row by row."""
        return (self._several_turns or self.row_by_row) and self.generation.streams_rows

    @property
    def _several_turns(self) -> bool:
        return max(self.max_turns.values(), default=1) > 1 or bool(self.drivers)

    def _sampler(self, rollouts: int, greedy: bool) -> TurnSampler:
        pad_token_id: int = self.tokenizer.pad_token_id
        if self.streams_rows:
            one_turn = not self._several_turns
            return RowSampler(self.generation, greedy=greedy, pad_token_id=pad_token_id, one_turn=one_turn)
        if self._several_turns:
            _log_batches(type(self.generation).__name__)
        return BatchSampler(
            self.generation,
            rollouts=rollouts,
            greedy=greedy,
            pad_token_id=pad_token_id,
            counts=self.activities.counts,
            one_turn=not self._several_turns,
        )


async def gather_or_cancel(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines concurrently; the first error cancels the others and is raised.

    Raises:
        RLCoreError: a coroutine raised CancelledError, although nothing cancelled it.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    cancelled = False
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        cancelled = any(task.cancelled() for task in tasks)
    finally:
        failed = [task for task in tasks if task.done() and not task.cancelled() and task.exception() is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in failed:
        task.result()
    if cancelled:
        raise RLCoreError(
            "A rollout ended with CancelledError, but the run did not cancel it: something that its environment waited for was "
            "cancelled. Catch CancelledError in the environment."
        )


@cache
def _log_batches(engine: str) -> None:
    """Logged once per engine."""
    _log.warning(
        "%s samples complete batches only (it has no `generate_async`), so each turn starts when all rollouts have ended the "
        "previous one: a slow environment call delays every rollout.",
        engine,
    )
