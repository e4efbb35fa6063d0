"""The rows of one call on their way: made of prompts, joined by prompt, put together into the answer; knows no model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_backends_hf.stopping import StopStringScanner
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.completions import Completion, Prompt, RowLimits, read_prompts, to_output
from rl_core.data.splitmix import derived_seeds
from rl_core.errors import DataError
from rl_core.interfaces.generation import GenerationOutputSpec


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

    def append(self, token: int, logprob: float, *, end_ids: frozenset[int]) -> bool:
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
    """Groups of rows with the same prompt tokens, wherever they stand in the batch; longest prompts first."""
    groups: dict[tuple[int, ...], PromptGroup] = {}
    for row in rows:
        key = tuple(row.prompt)
        groups.setdefault(key, PromptGroup(prompt=row.prompt, rows=[])).rows.append(row)
    return sorted(groups.values(), key=lambda group: len(group.prompt), reverse=True)


def rows_to_output(rows: Sequence[Row], *, weight_version: int) -> BatchedDataDict[GenerationOutputSpec]:
    """Finished rows as a `GenerationOutputSpec`, in the order given."""
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
        raise DataError(
            f"Row {prompt.number} has stop strings {wanted}, but there is no tokenizer to read text with. Give one."
        )
    return StopStringScanner(tokenizer, wanted, prompt.tokens) if wanted else None
