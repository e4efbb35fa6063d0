"""Chooses a replica for each row of a streaming engine, so that common prefixes are computed once."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from rl_core.data.batched_data_dict import BatchedDataDict

_MAX_SESSIONS: Final = 100_000
"""Number of sessions whose replica is remembered if callers do not close them."""


class ReplicaAffinity:
    """A row goes to the replica of its session, else of rows in progress with the same prompt, else to the least loaded one.

    Args:
        replicas: number of replicas.
    """

    def __init__(self, replicas: int) -> None:
        self._rows: dict[str, tuple[int, bytes]] = {}
        self._prompts: list[Counter[bytes]] = [Counter() for _ in range(replicas)]
        self._sessions: dict[str, int] = {}

    @property
    def load(self) -> list[int]:
        """Number of rows in progress on each replica."""
        return [prompts.total() for prompts in self._prompts]

    def place(self, name: str, row: BatchedDataDict[Any]) -> int:
        """The replica for a row (a batch of one), which is in progress there until `release`."""
        prompt = row["input_ids"][0, : int(row["input_lengths"][0])].numpy().tobytes()
        session = row["session_ids"][0] if "session_ids" in row else None
        rank = self._sessions.pop(session, None) if session is not None else None
        if rank is None:
            rank = next((rank for rank, prompts in enumerate(self._prompts) if prompt in prompts), None)
        if rank is None:
            load = self.load
            rank = load.index(min(load))
        if session is not None:
            self._sessions[session] = rank  # now the most recently used one
            if len(self._sessions) > _MAX_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
        self._rows[name] = (rank, prompt)
        self._prompts[rank][prompt] += 1
        return rank

    def release(self, name: str) -> None:
        """A row has ended."""
        rank, prompt = self._rows.pop(name)
        self._prompts[rank][prompt] -= 1
        if self._prompts[rank][prompt] == 0:
            del self._prompts[rank][prompt]

    def close(self, session: str) -> int | None:
        """Forget a session; returns its replica, if it had one."""
        return self._sessions.pop(session, None)
