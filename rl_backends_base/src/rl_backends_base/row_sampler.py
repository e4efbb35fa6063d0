"""Completes rows with a model that computes the logits of their next tokens: the loop of an engine, whatever the model keeps.

Rows join and leave between tokens, so ended rows are never computed. A row's seed alone decides its tokens.
"""

from __future__ import annotations

import math
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Final

import torch

from rl_backends_base.rows import Row, StopStringScanner
from rl_backends_base.token_choice import ROW_OPTIONS, SamplingParameters, next_tokens
from rl_core.backend import (
    BatchedDataDict,
    GenerationRequest,
    LengthLimits,
    PromptReader,
    return_freed_memory,
    to_output,
)
from rl_core.config.schema import GenerationConfig
from rl_core.data.batched_data_dict import to_device
from rl_core.data.generation_io import PROMPT_LOGPROBS
from rl_core.errors import InvalidComponentError, NonFiniteError, RLCoreError

_PAUSED_WAIT_S: Final = 0.01
"""Maximum duration of a poll while a refit has paused the rows; the next refit call must wait for it."""
POLLED_ROWS: Final = 16
"""Number of rows that `poll` prepares the model for; the number that arrives is not known."""

Alternatives = Mapping[int, list[tuple[int, float]]]
"""Number of a row to the most likely tokens and their log-probabilities."""
Results = dict[str, BatchedDataDict[Any] | RLCoreError]
"""Name of a row to its output, or to the error that prevents its completion."""


class TokenModel(ABC):
    """What computes the logits of rows in flight, with whatever it keeps of them: `Row.state`, or elsewhere."""

    max_batch_rows: int = 256
    """Maximum number of rows in flight; further rows wait."""
    scores_prompts: bool = False
    """Whether `prefill` sets `Row.prompt_scores` of rows with `lacks_prompt_scores`; other models refuse such rows."""

    @abstractmethod
    def prefill(self, rows: Sequence[Row]) -> torch.Tensor:
        """Start rows, which are in flight from now on, after the earlier ones.

        Returns:
            Logits [len(rows), V] of the token after the whole sequence of each (`row.sequence`): its prompt, and the tokens
            that older weights have sampled. They may be overwritten afterwards.
        """

    def decode(self, rows: Sequence[Row]) -> torch.Tensor:
        """Logits [len(rows), V] of the next token of all rows in flight; by default, each row is computed again.

        An engine that keeps a state computes only the latest token of each row, `row.tokens[-1]`.
        """
        return self.prefill(rows)

    def keep(self, rows: Sequence[Row]) -> None:
        """From now on, these rows are in flight, in this order. By default, nothing happens."""
        return None

    def forget(self, rows: Sequence[Row]) -> None:
        """Called before `keep` with the rows that leave; their `state` is dropped afterwards. By default, nothing happens."""
        return None

    def admit(self, waiting: Sequence[Row], active: Sequence[Row]) -> Sequence[Row]:
        """The rows of `waiting` to start now, next to the `active` ones; called again until there are none."""
        return waiting[: max(0, self.max_batch_rows - len(active))]

    def draw(self, rows: Sequence[Row], logits: torch.Tensor) -> tuple[torch.Tensor, Alternatives]:
        """Tokens and their log-probabilities, [2, len(rows)] float64, and the most likely tokens of rows that request them.

        One tensor, because the host waits for each that it reads from a GPU; float64 is exact for both. Overwrites `logits`. If
        ranks share a model, all of them must return the same.
        """
        return _draw_tokens(rows, logits)

    def assist(self) -> bool:
        """Called once all rows of a `generate` call have ended; for ranks that share layers with ranks which still have rows.

        Returns:
            Whether to call it again. By default, False.
        """
        return False

    def prepared(self, *, rows: int, steps: int) -> AbstractContextManager[Any]:
        """Prepare the model for sampling while the block runs, in which its weights do not change; by default, nothing happens.

        Args:
            rows: approximate number of rows.
            steps: approximate number of tokens of each.
        """
        return nullcontext()

    def without_gradients(self) -> AbstractContextManager[Any]:
        """Run the model without recording gradients, in this thread."""
        return torch.inference_mode()


class RowSampler:
    """Completes the rows of `generate` calls, and those of `poll`, which are in flight until they are collected.

    Nothing that depends on the weights is kept between calls of `generate`. Rows of `poll` compute only during `poll`; weights
    must not change between polls, except between `pause` and `resume`.

    Args:
        model: computes logits.
        config: the section `policy.generation`.
        vocab_size: token ids of prompts must be smaller.
        max_model_len: maximum number of tokens of prompt and completion.
        end_ids: tokens that end a row.
        tokenizer: a Transformers tokenizer, which stop strings require; None if there is none.
        parameters: the distribution; by default, that of the section.
        seed: for rows without `sample_seeds`.
        rank: index of the replica, whose rows without `sample_seeds` differ from those of others.
        reads_images: whether the model reads the images of a row (`Prompt.images`).

    Attributes:
        row_options: options that rows may have, besides temperature, top-p and top-k.
        batch: rows of the latest `generate` call, which other threads may read.
    """

    def __init__(
        self,
        model: TokenModel,
        config: GenerationConfig,
        *,
        vocab_size: int,
        max_model_len: int,
        end_ids: frozenset[int],
        tokenizer: Any = None,
        parameters: SamplingParameters | None = None,
        seed: int = 0,
        rank: int = 0,
        reads_images: bool = False,
    ) -> None:
        self.tokenizer, self.batch = tokenizer, list[Row]()
        self._model, self._config, self._end_ids = model, config, end_ids
        self._parameters = parameters or SamplingParameters.of(config)
        self.row_options = (*ROW_OPTIONS, *((PROMPT_LOGPROBS,) if model.scores_prompts else ()))
        self._reader = PromptReader(
            LengthLimits(vocab_size=vocab_size, max_model_len=max_model_len, max_new_tokens=config.max_new_tokens),
            stop_strings=config.stop_strings or (),
            reads_text=tokenizer is not None,
            reads_sampling=True,
            row_options=self.row_options,
            reads_images=reads_images,
            seed=seed,
            rank=rank,
        )
        self._vocab_size = vocab_size
        self._loop = DecodeLoop(model, end_ids, vocab_size=vocab_size)
        self._rows: dict[str, Row] = {}
        self._prepared = ExitStack()
        # A generator that is still open when the interpreter exits would fail while modules are unloaded.
        weakref.finalize(self, self._prepared.close)
        self._is_prepared = self._is_paused = False

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, data: BatchedDataDict[Any], *, greedy: bool) -> list[Row]:
        """Read the rows of a `generate` call, which have no sampled tokens yet; raises as `generate`."""
        shared, tokenizer = self._parameters, self.tokenizer
        return [
            Row(
                prompt=prompt,
                greedy=greedy,
                parameters=shared.with_own(prompt.sampling) if prompt.sampling else shared,
                scanner=StopStringScanner(tokenizer, prompt.stop_strings, prompt.tokens) if prompt.stop_strings else None,
            )
            for prompt in self._reader.read(data)
        ]

    def generate(self, data: BatchedDataDict[Any], *, greedy: bool, weight_version: int) -> BatchedDataDict[Any]:
        """Complete every row of `data`; see `GenerationInterface.generate`. Rows of `poll` are computed again afterwards.

        Raises:
            DataError: a prompt is empty, contains an id outside the vocabulary, or leaves no tokens within `max_model_len`.
            NonFiniteError: the model's logits are NaN or infinite.
        """
        rows = self.batch = self.read(data, greedy=greedy)
        if rows:
            loop = DecodeLoop(self._model, self._end_ids, vocab_size=self._vocab_size)
            count, steps = min(len(rows), self._model.max_batch_rows), max(row.prompt.limit for row in rows)
            prepared = nullcontext() if self._is_prepared else self._model.prepared(rows=count, steps=steps)
            with prepared, self._model.without_gradients():
                self._loop.recompute()
                try:
                    loop.add(rows)
                    while not loop.is_idle:
                        for row in loop.step(weight_version):
                            if row.error is not None:
                                raise row.error
                    while self._model.assist():
                        pass
                finally:
                    loop.recompute()
        return to_output([row.so_far() for row in rows], has_options="sampling" in data)

    def poll(
        self, arrivals: Sequence[GenerationRequest], *, cancelled: Sequence[str], wait_s: float, weight_version: int
    ) -> Results:
        """Advance the rows and return those that ended; tokens drawn now are marked with `weight_version`."""
        try:
            with self._model.without_gradients():
                self._loop.remove([row for name in cancelled if (row := self._rows.pop(name, None)) is not None])
                news = self._admit(arrivals)
                if not self._is_paused:
                    ended = self._compute(0.0 if news else wait_s, weight_version)
                    return news | self._collect(ended) | self._unfinished()
        except BaseException:
            self._drop_rows()  # a step that does not finish leaves the model's memory of its rows incomplete
            raise
        time.sleep(min(wait_s, _PAUSED_WAIT_S))
        return news

    def pause(self) -> None:
        """Hold all rows of `poll` while the weights change, and discard everything computed from the old ones."""
        self._is_paused = True
        self.drop_cache()

    def resume(self) -> None:
        """Continue; rows keep their tokens, and are computed again."""
        self._is_paused = False

    def drop_cache(self) -> None:
        """Discard everything that was computed from the weights."""
        with self._model.without_gradients():
            self._loop.recompute()
        self._prepared.close()
        self._is_prepared = False

    def release_if_idle(self) -> None:
        """Free what only sampling needs, unless rows of `poll` are in flight."""
        self.batch = []
        if not self._rows:
            self.drop_cache()

    def _drop_rows(self) -> None:
        self.drop_cache()
        self._loop.remove(self._rows.values())  # none of them is in flight
        self._rows.clear()

    def _admit(self, arrivals: Sequence[GenerationRequest]) -> Results:
        """Let rows join; returns the errors of those that cannot be completed."""
        refused: Results = {}
        joined: list[Row] = []
        for arrival in arrivals:
            try:
                [row] = self.read(arrival.row, greedy=arrival.greedy)
            except RLCoreError as error:  # of this row alone
                refused[arrival.name] = error
                continue
            row.session = arrival.row["session_ids"][0] if "session_ids" in arrival.row else None
            row.streams = "stream_tokens" in arrival.row and bool(arrival.row["stream_tokens"][0])
            self._rows[arrival.name] = row
            joined.append(row)
        self._loop.add(joined)
        return refused

    def _compute(self, wait_s: float, weight_version: int) -> list[Row]:
        """Draw tokens until rows end, which are returned, or `wait_s` is over; at least one step."""
        until = time.monotonic() + wait_s
        ended: list[Row] = []
        while self._rows and not ended:
            if not self._is_prepared:
                self._prepared.enter_context(self._model.prepared(rows=POLLED_ROWS, steps=self._config.max_new_tokens))
                self._is_prepared = True
            ended = self._loop.step(weight_version)
            if time.monotonic() >= until:
                break
        return ended

    def _collect(self, ended: Sequence[Row]) -> Results:
        names = {row: name for name, row in self._rows.items()}
        results: Results = {}
        for row in ended:
            del self._rows[names[row]]
            results[names[row]] = row.error or to_output([row.so_far()])
        if ended and not self._rows:
            return_freed_memory()
        return results

    def _unfinished(self) -> Results:
        """The rows that are streamed and have new tokens, with all their tokens."""
        results: Results = {}
        for name, row in self._rows.items():
            if row.streams and len(row.tokens) > row.streamed:
                row.streamed = len(row.tokens)
                results[name] = BatchedDataDict({**to_output([row.so_far()]), "unfinished": torch.tensor([True])})
        return results


class DecodeLoop:
    """Waiting rows, and rows in flight.

    Args:
        model: computes logits.
        end_ids: tokens that end a row.
        vocab_size: largest V of logits.
    """

    def __init__(self, model: TokenModel, end_ids: frozenset[int], *, vocab_size: int) -> None:
        self._model, self._end_ids, self._vocab_size = model, end_ids, vocab_size
        self._waiting: list[Row] = []
        self._active: list[Row] = []

    @property
    def is_idle(self) -> bool:
        """Whether there are no rows."""
        return not self._waiting and not self._active

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows, the longest first, so that rows of similar length start together."""
        self._waiting += _longest_first(rows)

    def remove(self, rows: Collection[Row]) -> None:
        """Drop unfinished rows."""
        gone = set(rows)
        self._waiting = [row for row in self._waiting if row not in gone]
        self._keep([slot for slot, row in enumerate(self._active) if row not in gone])

    def recompute(self) -> None:
        """Discard what the model keeps; rows in flight keep their tokens, and are computed again from their start."""
        self._waiting = _longest_first(self._active) + self._waiting
        self._keep([])

    def step(self, weight_version: int) -> list[Row]:
        """Draw at least one token for every row in flight; returns rows that ended, with a `NonFiniteError` in `error` if so.

        Args:
            weight_version: recorded with each token.
        """
        ended: list[Row] = []
        while self._waiting and (joining := list(self._model.admit(self._waiting, self._active))):
            gone, first = set(joining), len(self._active)
            self._waiting = [row for row in self._waiting if row not in gone]
            self._active += joining
            ended += self._draw(self._model.prefill(joining), first, weight_version)
        if self._waiting and not self._active and not ended:
            raise InvalidComponentError(
                f"{type(self._model).__name__}.admit took no row, although none is in flight: the shortest has "
                f"{self._waiting[-1].num_tokens} tokens, and `max_batch_rows` is {self._model.max_batch_rows}."
            )
        if self._active:
            ended += self._draw(self._model.decode(self._active), 0, weight_version)
        return ended

    def _draw(self, logits: torch.Tensor, first: int, weight_version: int) -> list[Row]:
        """Draw a token for the active rows from number `first` on, and remove ended rows, which are returned."""
        rows = self._active[first:]
        shape = list(getattr(logits, "shape", ()))
        if len(shape) != 2 or shape[0] != len(rows) or shape[1] > self._vocab_size:
            raise InvalidComponentError(
                f"{type(self._model).__name__} returned a {type(logits).__name__} of shape {shape} for {len(rows)} rows. "
                f"`prefill` and `decode` must return logits [{len(rows)}, V] of the next token of each row, without columns "
                f"beyond the {self._vocab_size} tokens of the vocabulary (`vocab_size` of `facts`)."
            )
        drawn, likely = self._model.draw(rows, logits)
        ended: list[Row] = []
        remaining = list(range(first))
        for number, alternatives in likely.items():
            rows[number].likely.append(alternatives)
        for slot, (row, token, logprob) in enumerate(zip(rows, *drawn.tolist(), strict=True), start=first):
            if not math.isfinite(logprob):
                row.error = NonFiniteError(
                    f"Row {row.prompt.number}: the logits after {row.num_tokens} tokens are NaN or infinite "
                    f"(log-probability {logprob}). The weights are invalid, or bfloat16 overflowed. Check the previous step."
                )
                ended.append(row)
            elif row.append(int(token), logprob, version=weight_version, end_ids=self._end_ids):
                ended.append(row)
            else:
                remaining.append(slot)
        self._keep(remaining)
        return ended

    def _keep(self, slots: list[int]) -> None:
        """Keep only the active rows with these numbers (ascending); the last of them fill the gaps, so that few rows move."""
        if len(slots) == len(self._active):
            return
        kept, staying = [self._active[slot] for slot in _compacted(slots)], set(slots)
        gone = [row for slot, row in enumerate(self._active) if slot not in staying]
        self._model.forget(gone)
        for row in gone:
            row.state = None
        self._active = kept
        self._model.keep(kept)


def _longest_first(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row.num_tokens, reverse=True)


def _draw_tokens(rows: Sequence[Row], logits: torch.Tensor) -> tuple[torch.Tensor, Alternatives]:
    device = logits.device
    seeds, positions = _indices([[row.prompt.seed for row in rows], [row.num_tokens for row in rows]], device)
    drawn, likely = torch.empty(2, len(rows), dtype=torch.float64, device=device), dict[int, list[tuple[int, float]]]()
    for (greedy, parameters, num_likely, wants_sets), numbers in _alike(rows).items():
        sets: list[torch.Tensor] | None = [] if wants_sets else None
        index = slice(None) if len(numbers) == len(rows) else _indices(numbers, device)
        alike = [rows[number] for number in numbers]
        tokens, logprobs, alternatives = next_tokens(
            logits[index],
            parameters=parameters,
            greedy=greedy,
            seeds=seeds[index],
            positions=positions[index],
            history=_history(alike, device) if parameters.repetition_penalty != 1.0 else None,
            sampled=[row.tokens for row in alike],
            likely=num_likely,
            sets=sets,
        )
        if sets is not None:
            all_kept = [torch.zeros(0, dtype=torch.int32)] * len(alike)
            for row, words in zip(alike, sets or all_kept, strict=True):
                row.sets.append(words)
        drawn[:, index] = torch.stack([tokens.double(), logprobs.double()])
        likely |= zip(numbers, alternatives, strict=False)
    return drawn, likely


def _history(rows: Sequence[Row], device: torch.device) -> torch.Tensor:
    """[N, T], the tokens of each row, padded with its first token."""
    held = [row.sequence for row in rows]
    width = max(len(tokens) for tokens in held)
    return _indices([tokens + tokens[:1] * (width - len(tokens)) for tokens in held], device)


def _indices(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    return to_device(torch.tensor(values, dtype=torch.int64), device)


def _alike(rows: Sequence[Row]) -> dict[tuple[bool, SamplingParameters, int, bool], Sequence[int]]:
    """Numbers of the rows by how they are sampled."""
    greedy, parameters, sampling = rows[0].greedy, rows[0].parameters, rows[0].prompt.sampling
    # Hashing them takes longer.
    if all(row.greedy == greedy and row.parameters is parameters and row.prompt.sampling == sampling for row in rows):
        return {(greedy, parameters, rows[0].num_likely, rows[0].wants_sets): range(len(rows))}
    kinds: dict[tuple[bool, SamplingParameters, int, bool], list[int]] = {}
    for number, row in enumerate(rows):
        kinds.setdefault((row.greedy, row.parameters, row.num_likely, row.wants_sets), []).append(number)
    return dict(kinds)


def _compacted(remaining: list[int]) -> list[int]:
    """Slots in their new order: the last ones fill the gaps, so that few rows move."""
    taken = set(remaining)
    movers = [slot for slot in reversed(remaining) if slot >= len(remaining)]
    return [target if target in taken else movers.pop() for target in range(len(remaining))]
