"""Streams the canary's rows as rollouts are streamed: one by one, in their event loop, and over a refit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_train.rollouts.collect import Collector, gather_or_cancel
from rl_train.rollouts.engines import RowSampler, SampledTurn, TurnRequest
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
