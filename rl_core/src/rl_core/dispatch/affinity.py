"""Places rows on the replicas of an engine, so that the rows of one prompt share a replica and thus their prefill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from rl_core.data.batched_data_dict import BatchedDataDict

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
