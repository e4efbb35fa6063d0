"""Runs a generation backend in a thread with its own event loop, so that sampling never blocks the HTTP server.

Other threads tokenize and decode, whose time grows with the text of a request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.generation_io import PROMPT_LOGPROBS
from rl_core.data.images import RowImage
from rl_core.errors import EngineDiedError, NotSupportedError, RLCoreError, WorkerDiedError, WorkerError
from rl_core.event_loop import EventLoopThread, in_thread
from rl_core.interfaces.generation import GenerationInterface
from rl_core.testing.outputs.models import checked_generation, generated

_log = logging.getLogger(__name__)
_END = object()
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True)
class SamplingRow:
    """One completion to sample."""

    prompt: Sequence[int]
    """Token ids of the prompt."""
    seed: int
    """Seed of the row, in [0, 2^63)."""
    max_new_tokens: int
    """Maximum number of tokens of the completion."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end the completion; the sampled tokens include them."""
    sampling: Mapping[str, Any] | None = None
    """Its own options, such as `temperature` and `json_schema`: see `GenerationDatumSpec`; None for the engine's."""
    images: Sequence[RowImage] = ()
    """The images in the prompt."""


@dataclass(frozen=True, kw_only=True)
class SampledRow:
    """A completion, or some of its tokens."""

    token_ids: list[int]
    """Sampled tokens, including the token or the string that ended the completion."""
    logprobs: list[float]
    """Log-probability of each token under the distribution it was sampled from, in nats."""
    truncated: bool
    """Whether a length limit ended the completion."""
    weight_version: int
    """Weight version that sampled it; -1 if the engine never received weights from a policy."""
    is_finished: bool = True
    """False while more tokens follow; `truncated` then has no meaning."""
    before: Sequence[int] = ()
    """Tokens of the completion before these."""
    top_logprobs: Sequence[Sequence[tuple[int, float]]] | None = None
    """The most likely tokens at each position and their log-probabilities, in descending order, if they were requested."""
    prompt_logprobs: Sequence[Sequence[tuple[int, float]]] | None = None
    """The same for the tokens of the prompt, each after the token itself, as in `GenerationOutputSpec`."""


class EngineClosedError(RLCoreError):
    """The engine was shut down."""


class EngineThread:
    """A generation backend that samples in its own thread.

    Rows of different requests run together if the backend implements `generate_async`. Otherwise whole batches run one after
    the other: requests that arrive during a batch form the next one.

    Args:
        generation: the engine; it is used by this thread only.

    Attributes:
        death: the exit of a process of the engine, if the last rows failed with it.
    """

    def __init__(self, generation: GenerationInterface) -> None:
        self._generation = generation
        self.death: Exception | None = None
        self._loop = EventLoopThread("rl-serve-engine")
        self._batches: WholeBatches | None = None
        self._is_closed = False
        self._loop.run(self._prepare())

    @property
    def streams_tokens(self) -> bool:
        """Whether completions are available while they are sampled."""
        return self._generation.streams_tokens

    async def sample(
        self, rows: Sequence[SamplingRow], *, greedy: bool, stream: bool = False
    ) -> AsyncGenerator[tuple[int, SampledRow], None]:
        """Yield (index in `rows`, completion) as each row finishes. Closing the iterator cancels unfinished rows.

        Args:
            rows: what to sample.
            greedy: take the most likely token at each position.
            stream: also yield completions with all their tokens so far when they have new ones, if the engine supports it.

        Raises:
            DataError: the engine rejects a row.
            WorkerError: a worker of the engine failed, or the engine could not sample a row.
            EngineClosedError: the engine was shut down.
        """
        here = asyncio.get_running_loop()
        queue: asyncio.Queue[Any] = asyncio.Queue()

        def put(item: Any) -> None:
            here.call_soon_threadsafe(queue.put_nowait, item)

        if self._is_closed:
            raise EngineClosedError("the engine was shut down")
        future = self._loop.start(self._sample(_as_batch(rows, stream=stream and self.streams_tokens), greedy, put))
        # Only `close` cancels it before this iterator is closed, after which nothing reads the queue.
        closed = EngineClosedError("the engine was shut down")
        future.add_done_callback(lambda done: put((_END, closed if done.cancelled() else done.exception())))
        try:
            while True:
                index, outcome = await queue.get()
                if index is not _END:
                    yield index, outcome
                elif outcome is not None:
                    raise outcome
                else:
                    return
        finally:
            future.cancel()

    async def call(self, function: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Call a function of the backend in the engine's thread, which starts no row meanwhile.

        Raises:
            EngineClosedError: the engine was shut down.
        """
        if self._is_closed:
            raise EngineClosedError("the engine was shut down")

        async def run() -> ResultT:
            return function(*arguments)

        return await asyncio.wrap_future(self._loop.start(run()))

    def close(self) -> None:
        """Cancel all rows and stop the thread; the backend itself is not shut down. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.run(self._cancel_all())
            self._loop.close()

    async def _prepare(self) -> None:
        self._generation.prepare_for_generation()

    async def _cancel_all(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample(self, batch: BatchedDataDict[Any], greedy: bool, put: Any) -> None:
        try:
            if self._batches is None:
                try:
                    await self._sample_rows(batch, greedy, put)
                except NotSupportedError as error:
                    _log.warning("the engine samples whole batches, one after the other: %s", error)
                    self._batches = WholeBatches(self._generation)
            if self._batches is not None:
                output = await self._batches.generate(batch, greedy=greedy)
                for index, length in enumerate(batch["input_lengths"].tolist()):
                    put((index, _row_of(output, index, length)))
            self.death = None
        except (EngineDiedError, WorkerDiedError) as error:
            self.death = error
            raise

    async def _sample_rows(self, batch: BatchedDataDict[Any], greedy: bool, put: Any) -> None:
        lengths = batch["input_lengths"].tolist()
        async for index, output in self._generation.generate_async(batch, greedy):
            if "unfinished" not in output:
                checked_generation(output, data=batch.slice(index, index + 1), generation=self._generation)
            put((index, _row_of(output, 0, lengths[index])))


class WholeBatches:
    """Merges requests into batches for an engine that only answers whole batches. Used from one event loop."""

    def __init__(self, generation: GenerationInterface) -> None:
        self._generation = generation
        self._waiting: list[_Waiting] = []
        self._working: asyncio.Task[None] | None = None

    async def generate(self, batch: BatchedDataDict[Any], *, greedy: bool) -> BatchedDataDict[Any]:
        """The output of `batch`, which is sampled together with all other requests that wait.

        Raises:
            RLCoreError: whatever the engine raises for the merged batch.
        """
        waiting = _Waiting(batch, greedy, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        return await waiting.output

    async def _work(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            requests = [request for request in self._waiting if request.merges_with(first)]
            self._waiting = [request for request in self._waiting if not request.merges_with(first)]
            requests = [request for request in requests if not request.output.cancelled()]
            if not requests:
                continue
            try:
                merged: BatchedDataDict[Any] = BatchedDataDict.from_batches([request.batch for request in requests])
                output = await asyncio.to_thread(generated, self._generation, merged, greedy=first.greedy)
            except Exception as error:  # every waiting request gets the error, which its own caller handles
                for request in requests:
                    if not request.output.done():
                        request.output.set_exception(error)
                continue
            ends = accumulate(request.batch.size for request in requests)
            for request, end in zip(requests, ends, strict=True):
                if not request.output.done():
                    request.output.set_result(output.select_indices(list(range(end - request.batch.size, end))))


@dataclass(frozen=True)
class _Waiting:
    batch: BatchedDataDict[Any]
    greedy: bool
    output: asyncio.Future[BatchedDataDict[Any]]

    def merges_with(self, other: _Waiting) -> bool:
        """Whether both can be rows of one batch."""
        return self.greedy == other.greedy and self.batch.keys() == other.batch.keys()


def _as_batch(rows: Sequence[SamplingRow], *, stream: bool) -> BatchedDataDict[Any]:
    prompts = [torch.tensor(row.prompt, dtype=torch.int64) for row in rows]
    sampling = [dict(row.sampling) if row.sampling else None for row in rows]
    return BatchedDataDict(
        {
            **({"sampling": sampling} if any(sampling) else {}),
            **({"images": [list(row.images) or None for row in rows]} if any(row.images for row in rows) else {}),
            **({"stream_tokens": torch.ones(len(rows), dtype=torch.bool)} if stream else {}),
            "input_ids": torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True),
            "input_lengths": torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64),
            "stop_strings": [list(row.stop_strings) or None for row in rows],
            "sample_seeds": torch.tensor([row.seed for row in rows], dtype=torch.int64),
            "max_new_tokens": torch.tensor([row.max_new_tokens for row in rows], dtype=torch.int64),
        }
    )


def _row_of(output: BatchedDataDict[Any], row: int, start: int) -> SampledRow:
    failures = output.get("failures")
    if failures is not None and failures[row] is not None:
        raise WorkerError(f"The engine could not sample the row: {failures[row]}")
    end = int(output["unpadded_sequence_lengths"][row])
    return SampledRow(
        token_ids=output["output_ids"][row, start:end].tolist(),
        logprobs=output["logprobs"][row, start:end].tolist(),
        truncated=bool(output["truncated"][row]),
        weight_version=int(output["weight_version"][row]),
        is_finished="unfinished" not in output,
        top_logprobs=output["top_logprobs"][row] if "top_logprobs" in output else None,
        prompt_logprobs=output[PROMPT_LOGPROBS][row] if PROMPT_LOGPROBS in output else None,
    )


_THREADS = 32
"""More than a machine needs for throughput, so that short texts do not wait for the long texts of other requests."""


class TokenizerThreads:
    """Tokenizes and decodes in separate threads, because those of asyncio may all wait for code in the sandbox.

    Tokenizers of the library `tokenizers` release the interpreter's lock while they work.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, function: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Call a function in a thread; it also finishes if the caller is cancelled.

        Raises:
            Exception: whatever the function raises.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="rl-serve-text")
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def close(self) -> None:
        """Wait for the running calls, cancel the others, and end the threads; a later `run` starts new ones."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await in_thread(partial(pool.shutdown, cancel_futures=True), name="rl-serve-close")
