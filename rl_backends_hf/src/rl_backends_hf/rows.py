"""The rows of one call: checked at the door, joined by prompt, put together into the answer; knows no model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rl_backends_hf.sampling import derived_seeds
from rl_backends_hf.stopping import StopStringScanner
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.padding import with_input_lengths
from rl_core.data.schema import pad_value
from rl_core.errors import DataError
from rl_core.interfaces.generation import GenerationOutputSpec


@dataclass(frozen=True, kw_only=True)
class RowLimits:
    """What bounds every row.

    Attributes:
        vocab_size: ids are below it.
        max_model_len: most tokens of prompt and completion.
        max_new_tokens: most tokens of a completion.
    """

    vocab_size: int
    max_model_len: int
    max_new_tokens: int


@dataclass(kw_only=True, eq=False)
class Row:
    """One completion on its way.

    Attributes:
        number: place in the batch.
        prompt: its tokens.
        seed: what its draws are made of.
        limit: most tokens of the completion.
        scanner: looks for its stop strings; None without any.
        completion: tokens drawn so far.
        logprobs: log-probability of each, in nats.
        stopped: ended by an end token or a stop string.
    """

    number: int
    prompt: list[int]
    seed: int
    limit: int
    scanner: StopStringScanner | None = None
    completion: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False

    @property
    def tokens(self) -> list[int]:
        """Prompt and completion."""
        return self.prompt + self.completion

    def take(self, token: int, logprob: float, *, end_ids: frozenset[int]) -> bool:
        """Append a token; True if the row ends with it."""
        self.completion.append(token)
        self.logprobs.append(logprob)
        # The scanner reads every token, so it is asked even where an end token settles the matter.
        found = self.scanner is not None and self.scanner.push(token)
        self.stopped = found or token in end_ids
        return self.stopped or len(self.completion) >= self.limit


@dataclass(frozen=True, kw_only=True)
class PromptGroup:
    """The rows that share a prompt, and so its prefill."""

    prompt: list[int]
    rows: list[Row]


def read_rows(
    data: Mapping[str, Any],
    *,
    limits: RowLimits,
    stop_strings: Sequence[str] = (),
    tokenizer: Any = None,
    seed: int = 0,
    call: int = 0,
) -> list[Row]:
    """The rows of a batch in its order.

    Args:
        data: see `GenerationDatumSpec`.
        limits: what bounds every row.
        stop_strings: those of every row, besides a row's own.
        tokenizer: needed where there are stop strings.
        seed: of rows that bring none, together with `call`.
        call: number of this call.

    Raises:
        DataError: an empty prompt, an id outside the vocabulary, no room for a token; names the row.
    """
    batch, prompts = _checked(data, limits)
    seeds = batch["sample_seeds"] if "sample_seeds" in batch else derived_seeds(seed, call, len(prompts))
    return [
        Row(number=number, prompt=prompt, seed=own_seed, limit=limit, scanner=scanner)
        for number, (prompt, own_seed, limit, scanner) in enumerate(
            zip(
                prompts,
                seeds.tolist(),
                _row_limits(batch, prompts, limits),
                _scanners(batch, prompts, tuple(stop_strings), tokenizer),
                strict=True,
            )
        )
    ]


def check_rows(data: Mapping[str, Any], *, limits: RowLimits) -> None:
    """Raise the `DataError` that `read_rows` would, where any prompt cannot be completed; nothing has run then."""
    batch, prompts = _checked(data, limits)
    _row_limits(batch, prompts, limits)


_READ = ("input_ids", "input_lengths", "attention_mask", "stop_strings", "sample_seeds", "max_new_tokens")


def group_by_prompt(rows: Iterable[Row]) -> list[PromptGroup]:
    """Groups of rows with the same prompt tokens, wherever they stand in the batch; longest prompts first."""
    groups: dict[tuple[int, ...], PromptGroup] = {}
    for row in rows:
        key = tuple(row.prompt)
        groups.setdefault(key, PromptGroup(prompt=row.prompt, rows=[])).rows.append(row)
    return sorted(groups.values(), key=lambda group: len(group.prompt), reverse=True)


def answer(rows: Sequence[Row], *, weight_version: int) -> BatchedDataDict[GenerationOutputSpec]:
    """Finished rows as a `GenerationOutputSpec`, in the order given."""
    lengths = [len(row.prompt) + len(row.completion) for row in rows]
    output_ids = torch.full((len(rows), max(lengths, default=0)), int(pad_value("output_ids")), dtype=torch.int64)
    logprobs = torch.zeros(output_ids.shape, dtype=torch.float32)
    for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        output_ids[place, :length] = torch.tensor(row.tokens)
        logprobs[place, len(row.prompt) : length] = torch.tensor(row.logprobs)
    return BatchedDataDict(
        {
            "output_ids": output_ids,
            "generation_lengths": torch.tensor([len(row.completion) for row in rows], dtype=torch.int64),
            "unpadded_sequence_lengths": torch.tensor(lengths, dtype=torch.int64),
            "logprobs": logprobs,
            "truncated": torch.tensor([not row.stopped for row in rows], dtype=torch.bool),
            "weight_version": torch.full((len(rows),), weight_version, dtype=torch.int64),
        }
    )


def _checked(data: Mapping[str, Any], limits: RowLimits) -> tuple[BatchedDataDict[Any], list[list[int]]]:
    """The columns that matter here, and the prompts without padding."""
    batch = with_input_lengths(BatchedDataDict({key: data[key] for key in _READ if key in data}))
    lengths: list[int] = batch["input_lengths"].tolist()
    prompts = [tokens[: max(length, 0)] for tokens, length in zip(batch["input_ids"].tolist(), lengths, strict=True)]
    for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        _check_prompt(number, prompt, length, limits)
    return batch, prompts


def _check_prompt(number: int, prompt: list[int], length: int, limits: RowLimits) -> None:
    if not prompt or length != len(prompt):
        raise DataError(
            f"Row {number} has input length {length} in {len(prompt)} positions: a prompt has at least one token, all of them "
            "inside input_ids. Drop the row, or begin it with a start token."
        )
    if length >= limits.max_model_len:
        raise DataError(
            f"Row {number} has a prompt of {length} tokens, which leaves no room for a completion within max_model_len = "
            f"{limits.max_model_len}. Raise policy.max_total_sequence_length (up to what the model can do) or drop the row."
        )
    outside = [token for token in prompt if not 0 <= token < limits.vocab_size]
    if outside:
        raise DataError(
            f"Row {number} holds token id {outside[0]}, outside the model's vocabulary of {limits.vocab_size}. "
            "Tokenize with the model's own tokenizer."
        )


def _row_limits(batch: BatchedDataDict[Any], prompts: list[list[int]], limits: RowLimits) -> list[int]:
    own = batch["max_new_tokens"].tolist() if "max_new_tokens" in batch else [limits.max_new_tokens] * len(prompts)
    for number, limit in enumerate(own):
        if limit < 1:
            raise DataError(f"Row {number} has max_new_tokens = {limit}: a completion has at least one token.")
    return [
        min(limit, limits.max_new_tokens, limits.max_model_len - len(prompt))
        for limit, prompt in zip(own, prompts, strict=True)
    ]


def _scanners(
    batch: BatchedDataDict[Any], prompts: list[list[int]], common: tuple[str, ...], tokenizer: Any
) -> list[StopStringScanner | None]:
    own = batch["stop_strings"] if "stop_strings" in batch else [None] * len(prompts)
    scanners: list[StopStringScanner | None] = []
    for number, (prompt, strings) in enumerate(zip(prompts, own, strict=True)):
        wanted = [*common, *(strings or ())]
        if any(not string for string in wanted):
            raise DataError(f"Row {number} has an empty stop string, which is everywhere. Leave it out.")
        if wanted and tokenizer is None:
            raise DataError(f"Row {number} has stop strings {wanted}, but there is no tokenizer to read text with. Give one.")
        scanners.append(StopStringScanner(tokenizer, wanted, prompt) if wanted else None)
    return scanners
