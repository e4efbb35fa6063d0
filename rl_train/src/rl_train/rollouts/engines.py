"""How rollouts sample from the generation backend: each turn on its own, or all rows of a turn in one call."""

from __future__ import annotations

import asyncio
import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.generation_io import SETS, SampledSets
from rl_core.data.images import RowImage
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.records import Message
from rl_core.testing.outputs.models import RightRow, checked_generation, generated, right_row
from rl_train.metrics.progress import RolloutCounts, SampledBatch
from rl_train.pools.pool import while_paused
from rl_train.rollouts.activity import ENGINE, RolloutActivity
from rl_train.rollouts.environment_pool import RowNotSampledError, StepFailedError
from rl_train.rollouts.trajectory import SampleStream, rollout_seed


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """One turn to sample."""

    token_ids: torch.Tensor
    """[T] int64, all tokens so far."""
    stop_strings: list[str] | None
    seed: int
    prompt_id: int
    """Shared by the rollouts of one prompt."""
    position: int
    """The rollout's index among those that run together."""
    messages: list[Message]
    """The conversation so far, for engines that read messages instead of token ids."""
    images: list[RowImage] | None = None
    """The images in the tokens."""
    max_new_tokens: int | None = None
    """Maximum number of new tokens; None for the engine's own limit."""
    on_tokens: Callable[[SampledTurn], None] | None = None
    """Called with all tokens so far when there are new ones; only by engines that stream tokens and sample rows."""


@dataclass(frozen=True, kw_only=True)
class SampledTurn:
    """What the model sampled in one turn, or the tokens so far."""

    token_ids: torch.Tensor
    """[T'] int64."""
    logprobs: torch.Tensor
    """[T'] float32, in nats."""
    truncated: bool
    """Whether a limit ended the turn; without meaning before its end."""
    weight_version: int
    """The oldest version of the weights that sampled it."""
    token_versions: torch.Tensor | None = None
    """[T'] int64, the version of each token; None if all have `weight_version`."""
    sampled_sets: SampledSets | None = None
    """The sets of the T' tokens, if they were requested."""


@dataclass(eq=False, kw_only=True)
class TurnSampler(ABC):
    """Samples turns of rollouts that run concurrently in one event loop.

    Attributes:
        generation: the engine.
        greedy: use greedy decoding.
        pad_token_id: padding of prompts.
        one_turn: whether every rollout has only one turn.
        with_sets: whether to request the set that each token is sampled from.
    """

    generation: GenerationInterface = field(kw_only=False)
    greedy: bool
    pad_token_id: int
    one_turn: bool = False
    with_sets: bool = False

    @abstractmethod
    async def sample(self, request: TurnRequest) -> SampledTurn:
        """Sample one turn. Cancelling the call cancels the request."""

    def rollout_ended(self, position: int) -> None:
        """Called when the rollout at `position` has ended, also if it was cancelled."""
        return None

    def _prompts(self, requests: Sequence[TurnRequest]) -> BatchedDataDict[Any]:
        prompts = [request.token_ids for request in requests]
        numbers = [[prompt.numel() for prompt in prompts], [request.seed for request in requests]]
        lengths, seeds, prompt_ids = torch.tensor([*numbers, [request.prompt_id for request in requests]], dtype=torch.int64)
        ids = pad_sequence(prompts, batch_first=True, padding_value=self.pad_token_id) if len(prompts) > 1 else prompts[0][None]
        batch: BatchedDataDict[Any] = BatchedDataDict(
            {
                "input_ids": ids,
                "input_lengths": lengths,
                "stop_strings": [request.stop_strings for request in requests],
                "sample_seeds": seeds,
                "prompt_id": prompt_ids,
            }
        )
        if self.with_sets:
            batch["sampling"] = [{SETS: True}] * len(requests)
        if self.generation.reads_messages:
            batch["messages"] = [request.messages for request in requests]
        if any(request.images for request in requests):
            batch["images"] = [request.images for request in requests]
        return batch


_sessions = itertools.count()


@dataclass(eq=False, kw_only=True)
class RowSampler(TurnSampler):
    """Samples each turn by itself; the engine runs the turns that are in progress together.

    A rollout of several turns is a session of the engine, which samples its turns on one replica and may keep keys and values
    between them.
    """

    _name: str = field(init=False, default_factory=lambda: f"rollouts-{next(_sessions)}")

    async def sample(self, request: TurnRequest) -> SampledTurn:
        batch = self._prompts([request])
        if not self.one_turn:
            batch["session_ids"] = [self._session(request.position)]
        if request.max_new_tokens is not None:
            batch["max_new_tokens"] = torch.tensor([request.max_new_tokens], dtype=torch.int64)
        if request.on_tokens is not None and self.generation.streams_tokens:
            batch["stream_tokens"] = torch.ones(1, dtype=torch.bool)
        rows: Any = self.generation.generate_async(batch, greedy=self.greedy)
        try:
            async for _, output in rows:
                if "unfinished" in output:
                    assert request.on_tokens is not None
                    request.on_tokens(_turns(output, [request])[0])
                    continue
                if (row := right_row(output, batch, self.generation)) is not None:
                    return _right_turn(row)
                output = checked_generation(output, data=batch, generation=self.generation)
                [turn] = _outcomes(output, [request])
                if isinstance(turn, StepFailedError):
                    raise turn
                return turn
        finally:
            await rows.aclose()
        raise RuntimeError(f"{type(self.generation).__name__}.generate_async ended without the output of its row")

    def rollout_ended(self, position: int) -> None:
        if not self.one_turn:
            self.generation.close_sessions([self._session(position)])

    def _session(self, position: int) -> str:
        return f"{self._name}-{position}"


@dataclass(eq=False, kw_only=True)
class BatchSampler(TurnSampler):
    """Samples when every rollout that has not ended waits for a turn, in one call, in the order of the rollouts.

    The batches do not depend on how long environments take, so runs can be repeated exactly.

    Attributes:
        rollouts: number of rollouts that have not ended.
        counts: updated for the progress of the run.
    """

    rollouts: int
    counts: RolloutCounts
    _waiting: list[tuple[TurnRequest, asyncio.Future[SampledTurn]]] = field(init=False, default_factory=list)

    async def sample(self, request: TurnRequest) -> SampledTurn:
        future: asyncio.Future[SampledTurn] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._schedule()
        return await future

    def rollout_ended(self, position: int) -> None:
        self.rollouts -= 1
        self._schedule()

    def _schedule(self) -> None:
        """Sample in a callback, so that rollouts continue in their order, the one that asked last included."""
        asyncio.get_running_loop().call_soon(self._run_if_complete)

    def _run_if_complete(self) -> None:
        self._waiting = [entry for entry in self._waiting if not entry[1].done()]  # others were cancelled
        if not self._waiting or len(self._waiting) < self.rollouts:
            return
        waiting, self._waiting = sorted(self._waiting, key=lambda entry: entry[0].position), []
        while_paused(self._run, waiting)

    def _run(self, waiting: list[tuple[TurnRequest, asyncio.Future[SampledTurn]]]) -> None:
        requests = [request for request, _ in waiting]
        read = self.generation.batch_progress
        self.counts.batch = SampledBatch(rows=len(requests), are_rollouts=self.one_turn, read=read)
        try:
            output = generated(self.generation, self._prompts(requests), greedy=self.greedy)
            turns = _outcomes(output, requests)
        except (Exception, asyncio.CancelledError) as error:  # otherwise, the rollouts would wait forever
            for _, future in waiting:
                if not future.done():
                    future.set_exception(error)
            return
        finally:
            self.counts.batch = None
        if self.one_turn:
            self.counts.sampled += len(requests)
        for (_, future), turn in zip(waiting, turns, strict=True):
            if future.done():
                continue
            if isinstance(turn, StepFailedError):
                future.set_exception(turn)
            else:
                future.set_result(turn)


class RolloutSampler:
    """One rollout's view of the engine: its turns have the seeds of this rollout.

    Args:
        sampler: shared by all rollouts.
        run_seed: the algorithm's `seed`.
        stream: purpose of the rollout.
        ordinal: the prompt's number.
        sample: index of the sample in its group.
        position: the rollout's index among those that run together.
        activity: records what the rollout waits for.
    """

    def __init__(
        self,
        sampler: TurnSampler,
        *,
        run_seed: int,
        stream: SampleStream,
        ordinal: int,
        sample: int,
        position: int,
        activity: RolloutActivity,
    ) -> None:
        self._sampler, self._run_seed, self._stream, self._activity = sampler, run_seed, stream, activity
        self._ordinal, self._sample, self._position = ordinal, sample, position
        self._turn = 0

    @property
    def name(self) -> str:
        """Identifies the rollout within a step."""
        return f"{self._stream.name.lower()}-{self._ordinal}-{'greedy' if self._sample < 0 else self._sample}"

    def restarted(self) -> RolloutSampler:
        """The engine for the same rollout from its first turn, with the same seeds."""
        again = copy.copy(self)
        again._turn = 0
        return again

    async def sample(
        self,
        token_ids: torch.Tensor,
        *,
        stop_strings: list[str] | None = None,
        messages: Sequence[Message] = (),
        images: list[RowImage] | None = None,
        max_new_tokens: int | None = None,
        on_tokens: Callable[[SampledTurn], None] | None = None,
    ) -> SampledTurn:
        """Sample the next turn.

        Args:
            token_ids: [T] all tokens so far.
            stop_strings: strings that end the turn.
            messages: the conversation so far, for engines that read messages.
            images: the images in the tokens.
            max_new_tokens: maximum number of new tokens, only for an engine that samples rows; by default the engine's limit.
            on_tokens: called with all tokens so far when there are new ones, only by an engine that streams tokens.

        Raises:
            StepFailedError: the engine could not sample this turn, but may sample others.
        """
        seed = rollout_seed(self._run_seed, self._stream, ordinal=self._ordinal, sample=self._sample, turn=self._turn)
        self._turn += 1
        self._activity.turn = self._turn
        request = TurnRequest(
            token_ids=token_ids,
            stop_strings=stop_strings,
            seed=seed,
            prompt_id=self._ordinal,
            position=self._position,
            messages=list(messages),
            images=images,
            max_new_tokens=max_new_tokens,
            on_tokens=on_tokens,
        )
        with self._activity.waiting(ENGINE):
            turn = await self._sampler.sample(request)
        self._activity.sampled(len(turn.token_ids))
        return turn


def _outcomes(output: BatchedDataDict[Any], requests: Sequence[TurnRequest]) -> list[SampledTurn | StepFailedError]:
    """The turn of each row of a call, or why it could not be sampled."""
    turns, failures = _turns(output, requests), output.get("failures")
    if failures is None:
        return list(turns)
    return [
        turn if failure is None else StepFailedError(RowNotSampledError(failure))
        for turn, failure in zip(turns, failures, strict=True)
    ]


def _right_turn(row: RightRow) -> SampledTurn:
    versions = row.token_versions
    return SampledTurn(
        token_ids=torch.tensor(row.token_ids, dtype=torch.int64),
        logprobs=torch.tensor(row.logprobs, dtype=torch.float32),
        truncated=row.truncated,
        weight_version=row.weight_version,
        token_versions=None if versions is None else torch.tensor(versions, dtype=torch.int64),
        sampled_sets=row.sampled_sets,
    )


def _turns(output: BatchedDataDict[Any], requests: Sequence[TurnRequest]) -> list[SampledTurn]:
    # Columns are read once per call: a call may have thousands of rows.
    ends, truncated, versions = (output[key].tolist() for key in ("unpadded_sequence_lengths", "truncated", "weight_version"))
    sets: list[SampledSets | None] = output.get(SETS) or [None] * len(requests)
    token_versions = output.get("token_versions")
    turns = []
    for row, request in enumerate(requests):
        sampled = slice(request.token_ids.numel(), ends[row])
        turns.append(
            SampledTurn(
                token_ids=output["output_ids"][row, sampled].clone(),
                logprobs=output["logprobs"][row, sampled].clone(),
                truncated=truncated[row],
                weight_version=versions[row],
                token_versions=None if token_versions is None else token_versions[row, sampled].clone(),
                sampled_sets=None
                if (own := sets[row]) is None
                else SampledSets(counts=own["counts"][sampled], words=own["words"]),
            )
        )
    return turns
