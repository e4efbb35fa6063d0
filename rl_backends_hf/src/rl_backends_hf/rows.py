"""The rows of one generation call: created from prompts, grouped by prompt, and converted to the output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_backends_hf.stopping import StopStringScanner
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.generation_io import Completion, LengthLimits, Prompt, read_prompts, to_output
from rl_core.data.stateless_rng import derived_seeds
from rl_core.errors import DataError
from rl_core.interfaces.generation import GenerationOutputSpec


@dataclass(kw_only=True, eq=False)
class Row:
    """One unfinished completion.

    Attributes:
        number: row index in the batch.
        prompt: its tokens.
        seed: of its random draws.
        limit: maximum number of tokens of the completion.
        scanner: searches for stop strings; None if there are none.
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

    def append(self, token: int, logprob: float, *, end_ids: frozenset[int]) -> bool:
        """Append a token; returns whether the row ends with it."""
        self.completion.append(token)
        self.logprobs.append(logprob)
        # The scanner must read every token, including end tokens.
        found = self.scanner is not None and self.scanner.push(token)
        self.stopped = found or token in end_ids
        return self.stopped or len(self.completion) >= self.limit


@dataclass(frozen=True, kw_only=True)
class PromptGroup:
    """Rows that share a prompt and its prefill."""

    prompt: list[int]
    rows: list[Row]


def read_rows(
    data: Mapping[str, Any],
    *,
    limits: LengthLimits,
    stop_strings: Sequence[str] = (),
    tokenizer: Any = None,
    seed: int = 0,
    call: int = 0,
) -> list[Row]:
    """The rows of a batch in its order.

    Args:
        data: see `GenerationDatumSpec`.
        limits: length limits of all rows.
        stop_strings: stop strings of all rows, in addition to a row's own.
        tokenizer: required if there are stop strings.
        seed: for rows without a seed, combined with `call`.
        call: number of this call.

    Raises:
        DataError: as `read_prompts`, or stop strings without a tokenizer.
    """
    prompts = read_prompts(data, limits)
    derived: list[int] = derived_seeds(seed, call, len(prompts)).tolist()
    return [
        Row(
            number=prompt.number,
            prompt=prompt.tokens,
            seed=own_seed if prompt.seed is None else prompt.seed,
            limit=prompt.limit,
            scanner=_scanner(prompt, tuple(stop_strings), tokenizer),
        )
        for prompt, own_seed in zip(prompts, derived, strict=True)
    ]


def group_by_prompt(rows: Iterable[Row]) -> list[PromptGroup]:
    """Groups of rows with the same prompt tokens; longest prompts first."""
    groups: dict[tuple[int, ...], PromptGroup] = {}
    for row in rows:
        key = tuple(row.prompt)
        groups.setdefault(key, PromptGroup(prompt=row.prompt, rows=[])).rows.append(row)
    return sorted(groups.values(), key=lambda group: len(group.prompt), reverse=True)


def rows_to_output(rows: Sequence[Row], *, weight_version: int) -> BatchedDataDict[GenerationOutputSpec]:
    """Finished rows as a `GenerationOutputSpec`, in the given order."""
    return to_output(
        [
            Completion(
                prompt=row.prompt,
                tokens=row.completion,
                logprobs=row.logprobs,
                truncated=not row.stopped,
                weight_version=weight_version,
            )
            for row in rows
        ]
    )


def _scanner(prompt: Prompt, common: tuple[str, ...], tokenizer: Any) -> StopStringScanner | None:
    wanted = [*common, *prompt.stop_strings]
    if wanted and tokenizer is None:
        raise DataError(f"Row {prompt.number} has stop strings {wanted}, which require a tokenizer. Set policy.tokenizer.name.")
    return StopStringScanner(tokenizer, wanted, prompt.tokens) if wanted else None
