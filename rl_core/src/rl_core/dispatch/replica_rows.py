"""Rows of a call: columns selected and padded for workers; placed on an engine's replicas by prompt, sampled, put in order."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from rl_core.cluster.worker_group import WorkerGroup
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.generation_io import refuse_text, with_input_lengths
from rl_core.errors import BrokenPromiseError, DataError, WeightSyncError, WorkerDiedError
from rl_core.interfaces.generation import GenerationOutputSpec
from rl_core.interfaces.worker import GlobalCounts

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


PADDING_PROMPT = -1
"""`prompt_id` of padding rows."""


def select_columns(data: BatchedDataDict[Any], keys: Collection[str]) -> BatchedDataDict[Any]:
    """Only the columns that the ranks need.

    An `attention_mask` is converted to `input_lengths`. The output of an engine is accepted as rows: `output_ids` and
    `unpadded_sequence_lengths` become `input_ids` and `input_lengths`.

    Raises:
        DataError: a column is missing, or an `attention_mask` is not right-padded or contradicts `input_lengths`.
    """
    refuse_text(data)
    columns = dict(data.data if isinstance(data, BatchedDataDict) else data)
    if "input_ids" in keys and "input_ids" not in columns and "output_ids" in columns:
        columns["input_ids"] = columns["output_ids"]
        columns.setdefault("input_lengths", columns["unpadded_sequence_lengths"])
    elif "input_lengths" in keys and "attention_mask" in columns:
        columns = dict(with_input_lengths(BatchedDataDict(columns)))
    if missing := [key for key in keys if key not in columns]:
        raise DataError(
            f"The batch has no {', '.join(f'`{key}`' for key in missing)}; it has {', '.join(sorted(map(str, columns)))}. "
            "See docs/batch_keys.md for each key's content and writer."
        )
    return BatchedDataDict({key: columns[key] for key in keys})


def check_rows(answer: Any, key: str, rows: int) -> None:
    """Refuse a worker's answer that cannot be put in the order of the call: one without `rows` rows of the column `key`."""
    column = answer.get(key) if isinstance(answer, Mapping) else None
    if not isinstance(column, torch.Tensor):
        found = "no column" if column is None else f"a {type(column).__name__} as"
        raise BrokenPromiseError(f"returned {found} `{key}`. It must be a tensor.")
    if len(column) != rows:
        raise BrokenPromiseError(f"returned {len(column)} rows of `{key}` for a call with {rows} rows.")


def pad_rows_to_multiple(rows: BatchedDataDict[Any], multiple: int) -> BatchedDataDict[Any]:
    """`rows`, padded with copies of the first row to a multiple of `multiple` rows.

    A padding row has one token and is masked out (`sample_mask` and `token_mask` are 0), so no mean depends on it.
    """
    missing = -rows.size % multiple
    if missing == 0:
        return rows
    return BatchedDataDict.from_batches([rows, padding_rows(rows, 0, missing)])


def padding_rows(rows: BatchedDataDict[Any], row: int, count: int) -> BatchedDataDict[Any]:
    """`count` copies of row `row`, cut to one token and masked out, so that they have no effect on training."""
    filler = rows.slice(row, row + 1).repeat_interleave(count)
    filler["input_lengths"] = torch.ones_like(filler["input_lengths"])
    for mask in ("token_mask", "sample_mask"):
        if mask in filler:
            filler[mask] = torch.zeros_like(filler[mask])
    if "prompt_id" in filler:
        filler["prompt_id"] = torch.full_like(filler["prompt_id"], PADDING_PROMPT)
    return filler


def global_counts(rows: BatchedDataDict[Any], batch_size: int) -> list[GlobalCounts]:
    """Number of trained sequences and tokens in each global batch of `batch_size` rows."""
    seqs = (rows["sample_mask"] > 0).double()
    toks = ((rows["token_mask"] > 0) & (rows["sample_mask"] > 0).unsqueeze(-1)).sum(dim=-1).double()
    return [
        GlobalCounts(valid_seqs=float(s.sum()), valid_toks=float(t.sum()))
        for s, t in zip(seqs.split(batch_size), toks.split(batch_size), strict=True)
    ]


_MAX_SESSIONS: Final = 100_000
"""Number of sessions whose replica is remembered if callers do not close them."""

PromptKey = int | bytes


def prompt_keys(rows: BatchedDataDict[Any]) -> list[PromptKey]:
    """The identity of each row's prompt: its `prompt_id`, or the tokens of the prompt if the batch has no such column."""
    if "prompt_id" in rows:
        return list(rows["prompt_id"].tolist())
    ids, lengths = rows["input_ids"], rows["input_lengths"]
    return [ids[row, : int(lengths[row])].numpy().tobytes() for row in range(rows.size)]


def split_by_prompt(prompts: Iterable[PromptKey], num_shards: int) -> list[list[int]]:
    """Row indices of at most `num_shards` non-empty shards of similar size; rows with equal keys are in one shard."""
    groups: dict[PromptKey, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(row)
    parts: list[list[int]] = [[] for _ in range(num_shards)]
    for members in sorted(groups.values(), key=len, reverse=True):
        min(parts, key=len).extend(members)
    return [part for part in parts if part]


class ReplicaAffinity:
    """A row goes to the replica of its session, else of rows in progress with the same prompt, else to the least loaded one.

    Args:
        replicas: number of replicas.
    """

    def __init__(self, replicas: int) -> None:
        self._rows: dict[str, tuple[int, PromptKey]] = {}
        self._prompts: list[Counter[PromptKey]] = [Counter() for _ in range(replicas)]
        self._sessions: dict[str, int] = {}
        self.excluded: set[int] = set()
        """Replicas that get no more rows, unless all are excluded."""

    @property
    def load(self) -> list[int]:
        """Number of rows in progress on each replica."""
        return [prompts.total() for prompts in self._prompts]

    def assign(self, name: str, row: BatchedDataDict[Any]) -> int:
        """Choose the replica for a row (a batch of one), which counts as in progress there until `release`."""
        [prompt] = prompt_keys(row)
        session = row["session_ids"][0] if "session_ids" in row else None
        rank = self._sessions.pop(session, None) if session is not None else None
        if rank is None or rank in self.excluded:
            rank = next((rank for rank, prompts in enumerate(self._prompts) if prompt in prompts), None)
        if rank is None:
            load = self.load
            rank = min(range(len(load)), key=lambda one: (one in self.excluded, load[one]))
        if session is not None:
            self._sessions[session] = rank  # now the most recently used one
            if len(self._sessions) > _MAX_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
        self._rows[name] = (rank, prompt)
        self._prompts[rank][prompt] += 1
        return rank

    def release(self, name: str) -> None:
        """Release a row's slot on its replica."""
        rank, prompt = self._rows.pop(name)
        self._prompts[rank][prompt] -= 1
        if self._prompts[rank][prompt] == 0:
            del self._prompts[rank][prompt]

    def close(self, session: str) -> int | None:
        """Forget a session; returns its replica, if it had one."""
        return self._sessions.pop(session, None)
