"""Runs rollouts concurrently in one event loop: one coroutine per rollout, so that none waits for the turns of others.

Rows of the canary (`rl_train.weight_sync.canary`) are streamed in the same loop, also over a refit.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, TypeVar

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import ConfigError, RLCoreError
from rl_core.interfaces.environment import EnvironmentInterface
from rl_core.interfaces.generation import GenerationInterface
from rl_train.pools.pool import PausingLoop, running_loop
from rl_train.rollouts.activity import ActivityLog, RolloutActivity
from rl_train.rollouts.drivers import EnvironmentDriver, RolloutDriver
from rl_train.rollouts.engines import BatchSampler, RolloutSampler, RowSampler, SampledTurn, TurnRequest, TurnSampler
from rl_train.rollouts.environment_pool import RolloutTimeoutError, StepFailedError
from rl_train.rollouts.sessions import Session, StepQueue
from rl_train.rollouts.source import is_baseline
from rl_train.rollouts.trajectory import SampleStream, Trajectory
from rl_train.tools.parsers import ToolCallParser
from rl_train.weight_sync.canary import RowStreaming


def stream_rows_of(collector: Collector, *, over_refits: bool) -> RowStreaming:
    """`RowStreaming` with the engine and the event loop of a run's rollouts.

    Args:
        collector: plays the rollouts.
        over_refits: whether rows may be in progress at a refit; otherwise they begin after it.
    """

    @contextmanager
    def stream(rows: BatchedDataDict[Any], greedy: bool) -> Iterator[Callable[[], BatchedDataDict[Any]]]:
        streams = _Streams(collector, rows, greedy=greedy)
        try:
            if over_refits:
                streams.start()
                streams.await_first()
            yield streams.finish
        finally:
            streams.cancel()

    return stream


class _Streams:
    """Rows that are sampled repeatedly, until each has tokens of the engine's newest weights."""

    def __init__(self, collector: Collector, rows: BatchedDataDict[Any], *, greedy: bool) -> None:
        self._generation, self._loop, self._rows = collector.generation, collector.loop, rows
        self._pad_token_id = collector.tokenizer.pad_token_id
        self._sampler = RowSampler(self._generation, greedy=greedy, pad_token_id=self._pad_token_id, one_turn=True)
        self._version: int | None = None
        """The version that rows must reach; None before the refit has ended."""
        self._turns: dict[int, SampledTurn] = {}
        self._first_ended = asyncio.Event()
        self._future: Future[None] | None = None

    def start(self) -> None:
        self._future = self._loop.start(gather_or_cancel([self._repeat(row) for row in range(self._rows.size)]))

    def await_first(self) -> None:
        """Wait until a row has ended, so that the engine samples the others."""
        self._loop.run(self._first_ended.wait(), meanwhile=self._generation.await_weights)

    def finish(self) -> BatchedDataDict[Any]:
        self._version = self._generation.weight_version
        if self._future is None:
            self.start()
        assert self._future is not None
        self._loop.wait(self._future.done, meanwhile=self._generation.await_weights)
        self._future.result()
        return self._output([self._turns[row] for row in range(self._rows.size)])

    def cancel(self) -> None:
        if self._future is not None:
            self._future.cancel()

    async def _repeat(self, row: int) -> None:
        is_last = False
        while not is_last:
            is_last = self._version is not None
            try:
                turn = self._turns[row] = await self._sampler.sample(self._request(row))
            finally:
                self._first_ended.set()
                self._sampler.rollout_ended(row)
            # A row that began before the refit may also have ended before it.
            is_last |= self._version is not None and int(_versions(turn)[-1]) == self._version

    def _request(self, row: int) -> TurnRequest:
        prompt = self._rows["input_ids"][row, : int(self._rows["input_lengths"][row])]
        return TurnRequest(
            token_ids=prompt,
            stop_strings=None,
            seed=int(self._rows["sample_seeds"][row]),
            prompt_id=-1 - row,  # that of no rollout, so that the rows are divided among the replicas
            position=row,
            messages=[],
            images=self._rows["images"][row] if "images" in self._rows else None,
            max_new_tokens=int(self._rows["max_new_tokens"][row]),
        )

    def _output(self, turns: list[SampledTurn]) -> BatchedDataDict[Any]:
        prompts = [self._request(row).token_ids for row in range(len(turns))]
        lengths = torch.tensor([len(turn.token_ids) for turn in turns])

        def padded(values: list[torch.Tensor], padding: float) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=padding)

        rows = list(zip(prompts, turns, strict=True))
        return BatchedDataDict(
            {
                "output_ids": padded([torch.cat([prompt, turn.token_ids]) for prompt, turn in rows], self._pad_token_id),
                "logprobs": padded([torch.cat([torch.zeros(len(prompt)), turn.logprobs]) for prompt, turn in rows], 0.0),
                "token_versions": padded(
                    [torch.cat([torch.full_like(prompt, -1), _versions(turn)]) for prompt, turn in rows], -1
                ),
                "generation_lengths": lengths,
                "unpadded_sequence_lengths": lengths + torch.tensor([len(prompt) for prompt in prompts]),
                "weight_version": torch.tensor([turn.weight_version for turn in turns]),
                "newest_version": torch.tensor([int(_versions(turn)[-1]) for turn in turns]),
            }
        )


def _versions(turn: SampledTurn) -> torch.Tensor:
    """[T'] int64, the version of each token."""
    return torch.full_like(turn.token_ids, turn.weight_version) if turn.token_versions is None else turn.token_versions


ResultT = TypeVar("ResultT")

_CHECK_S = 0.1
"""Interval in which a thread that waits for rollouts checks whether it must do something for them."""
_STOP_S = 10.0
"""Maximum time that cancelled coroutines may take to end."""


class RolloutLoop:
    """An event loop that keeps its rollouts from one call to the next, until it is closed.

    The loop runs in its own thread, so rollouts continue during training. For an engine that computes in the calling thread, it
    only runs while that thread waits.

    Args:
        threaded: whether it has its own thread. In a thread that runs an event loop itself, such as that of a notebook, it
            always has one.
        takes_turns: whether that thread also runs it only while another one waits, because engine and training would slow each
            other down on the cores that they share.
    """

    def __init__(self, *, threaded: bool = False, takes_turns: bool = False) -> None:
        self._threaded, self._takes_turns = threaded, takes_turns
        self._is_awaited = threading.Event()
        """Ends the pause between two turns."""
        self._loop = PausingLoop()
        self._loop.set_exception_handler(_report_unless_interrupted)
        self._threads: list[threading.Thread] = []
        """The loop's own thread, if it has one."""
        self._changed = threading.Condition()
        self.awaited_since: float | None = None
        """Since when a thread waits for rollouts, in seconds of `time.perf_counter`; None if none does."""
        self._close = weakref.finalize(self, _stop, self._loop, self._threads, self._is_awaited)

    def start(self, coroutine: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        """Start a coroutine; without a thread, it runs during `wait`."""
        if not self._threads and (self._threaded or running_loop() is not None):
            self._threads.append(threading.Thread(target=self._loop.run_forever, name="rlcore-rollouts", daemon=True))
            self._threads[0].start()
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        future.add_done_callback(self._notify)
        return future

    def wait(self, condition: Callable[[], bool], *, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait until a condition holds, which is checked whenever a coroutine has ended.

        Args:
            condition: whether to return.
            meanwhile: called repeatedly in this thread, if the loop has its own.
        """
        self.awaited_since = time.perf_counter()
        self._is_awaited.set()
        try:
            while not condition():
                if not self._threads:
                    self._loop.run_forever()  # until `_notify`
                    continue
                meanwhile()
                with self._changed:
                    if not condition():
                        self._changed.wait(_CHECK_S)
        finally:
            self.awaited_since = None
            if self._takes_turns and self._threads and not self._loop.is_closed():
                self._is_awaited.clear()
                self._loop.call_soon_threadsafe(self._loop.hold, self._is_awaited)

    def run(self, coroutine: Coroutine[Any, Any, ResultT], *, meanwhile: Callable[[], None] = lambda: None) -> ResultT:
        """Run a coroutine to its end; arguments as `wait`."""
        future = self.start(coroutine)
        try:
            self.wait(future.done, meanwhile=meanwhile)
        except BaseException:
            future.cancel()
            raise
        return future.result()

    def close(self) -> None:
        """Cancel all coroutines and stop the thread; calling it twice is fine."""
        self._is_awaited.set()
        if self._close.alive and self._threads:
            try:
                asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(_STOP_S)
            except TimeoutError:
                _log.warning("Some rollouts did not stop within %g s after they were cancelled.", _STOP_S)
        elif self._close.alive:
            self._loop.run_until_complete(_cancel_all())
        self._close()

    def _notify(self, _: Future[Any]) -> None:
        if not self._threads and self.awaited_since is not None:  # after an interruption, it would end the loop of `close`
            self._loop.stop()
        with self._changed:
            self._changed.notify_all()


def _report_unless_interrupted(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log the error of a task, except an interruption, which also ended the loop."""
    if not isinstance(context.get("exception"), KeyboardInterrupt | SystemExit):
        loop.default_exception_handler(context)


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


def _stop(loop: asyncio.AbstractEventLoop, threads: list[threading.Thread], is_awaited: threading.Event) -> None:
    is_awaited.set()
    for thread in threads:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_STOP_S)
    if not loop.is_running():
        loop.close()


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
        with_sets: whether rollouts for training record the set that each token was sampled from.
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
    with_sets: bool = False
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
            greedy: use greedy decoding for all rollouts; otherwise only for baselines.
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
        if self.generation.reads_messages and any(row.images() for row in trajectories):
            raise ConfigError(
                "A prompt has an image, which engines that read messages cannot read. Use an engine for token ids, or leave "
                "images out (images_key: null)."
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
        with_sets = self.with_sets and stream is SampleStream.TRAINING
        greedily = [greedy or is_baseline(row) for row in trajectories]
        samplers = {
            how: self._sampler(greedily.count(how), how, with_sets=with_sets and not how) for how in sorted(set(greedily))
        }

        async def play(position: int, row: Trajectory) -> None:
            sampler = samplers[greedily[position]]
            driver = self.drivers.get(row.task_name, self._driver)
            which = "greedy rollout" if is_baseline(row) else f"sample {row.sample}"
            name = f"{stream.name.lower()} prompt {row.ordinal}, {which}, task {row.task_name}"
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
                    row.finished = True
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

    def _sampler(self, rollouts: int, greedy: bool, *, with_sets: bool) -> TurnSampler:
        how: dict[str, Any] = {
            "greedy": greedy,
            "pad_token_id": self.tokenizer.pad_token_id,
            "one_turn": not self._several_turns,
            "with_sets": with_sets,
        }
        if self.streams_rows:
            return RowSampler(self.generation, **how)
        if self._several_turns:
            _log_batches(type(self.generation).__name__)
        return BatchSampler(self.generation, rollouts=rollouts, counts=self.activities.counts, **how)


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
