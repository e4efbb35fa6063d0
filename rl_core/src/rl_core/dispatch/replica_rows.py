"""Rows of one call over the replicas of an engine: split by prompt, sampled, and put back in order."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from rl_core.cluster.worker_group import WorkerGroup
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.dispatch.affinity import prompt_keys, split_by_prompt
from rl_core.dispatch.rows import select_columns
from rl_core.errors import WeightSyncError, WorkerDiedError
from rl_core.interfaces.generation import GenerationOutputSpec

_log = logging.getLogger(__name__)

ROW_KEYS = (
    *("input_ids", "input_lengths", "stop_strings", "sample_seeds", "max_new_tokens", "session_ids", "prompt_id", "sampling"),
    "stream_tokens",
)


def generate_on(
    group: WorkerGroup, data: BatchedDataDict[Any], *, greedy: bool, deadline_s: float, ranks: Sequence[int] | None = None
) -> BatchedDataDict[GenerationOutputSpec]:
    """Split the rows over `ranks` of `group` (all by default), sample, and return the outputs in the order of `data`.

    Raises:
        WorkerDiedError: a rank died.
    """
    rows = prompt_columns(data)
    answers, deaths = sample_rows(group, rows, list(range(rows.size)), greedy=greedy, deadline_s=deadline_s, ranks=ranks)
    if deaths:
        raise deaths[0]
    return in_row_order(answers)


Answer = tuple[list[int], BatchedDataDict[Any]]
"""Row indices, and one replica's output for them."""


def prompt_columns(data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    """The columns that a replica samples from."""
    return select_columns(data, [key for key in ROW_KEYS if key in data or key == "input_ids" or key == "input_lengths"])


def sample_rows(
    group: WorkerGroup,
    rows: BatchedDataDict[Any],
    wanted: list[int],
    *,
    greedy: bool,
    deadline_s: float,
    ranks: Sequence[int] | None = None,
) -> tuple[list[Answer], list[WorkerDiedError]]:
    """The outputs of the `wanted` rows, spread over `ranks` (all by default), and an error for each rank that died."""
    ranks = range(group.world_size) if ranks is None else ranks
    prompts = prompt_keys(rows.select_indices(wanted))
    parts = [[wanted[row] for row in part] for part in split_by_prompt(prompts, len(ranks))]
    shards = {rank: (rows.select_indices(part),) for rank, part in zip(ranks, parts, strict=False)}
    outcomes = group.submit_some("generate", shards, greedy=greedy).settle(deadline_s)
    deaths = [outcome for outcome in outcomes if isinstance(outcome, WorkerDiedError)]
    answers = [(part, o) for part, o in zip(parts, outcomes, strict=True) if not isinstance(o, WorkerDiedError)]
    return answers, deaths


def newest_version(answers: Sequence[Answer]) -> list[Answer]:
    """The answers sampled with the newest weights: the policy may have been updated between a death and the next refit."""
    newest = max((int(output["weight_version"].max()) for _, output in answers), default=-1)
    kept = [answer for answer in answers if bool((answer[1]["weight_version"] == newest).all())]
    if len(kept) < len(answers):
        _log.warning("answers sampled before weight version %d are dropped: the rows of a call must have one version", newest)
    return kept


def in_row_order(answers: Sequence[Answer]) -> BatchedDataDict[GenerationOutputSpec]:
    """All outputs in the order of the rows."""
    output: BatchedDataDict[Any] = BatchedDataDict.from_batches([answer for _, answer in answers])
    output.reorder_data([row for part, _ in answers for row in part])
    return output


def equal_answer(answers: Sequence[Any], method: str) -> Any:
    """The answer of all replicas, which must be equal.

    Raises:
        WeightSyncError: the replicas differ.
    """
    if any(answer != answers[0] for answer in answers):
        raise WeightSyncError(
            f"The {len(answers)} generation replicas have different weights ({method} differs): a refit failed. Resume the run."
        )
    return answers[0]
