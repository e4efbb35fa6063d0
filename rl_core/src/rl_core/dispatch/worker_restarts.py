"""Restarts dead workers up to a limit."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rl_core.cluster.worker_group import WorkerGroup
from rl_core.errors import WorkerDiedError, WorkerError

_log = logging.getLogger(__name__)


class WorkerRestarter:
    """Restarts the workers of one group.

    Args:
        group: the workers.
        max_restarts: maximum number of restarts over the group's life.
        key: the config key of that number, for errors.
        start_s: timeout of the new workers' `setup`.
    """

    def __init__(self, group: WorkerGroup, *, max_restarts: int, key: str, start_s: float) -> None:
        self._group = group
        self._max_restarts = max_restarts
        self._key = key
        self._start_s = start_s
        self.count = 0
        """Workers replaced so far."""
        self.restarted: Counter[int] = Counter()
        """By rank: number of replacements that have started."""

    def restart_dead(self, facts: Sequence[Mapping[str, Any]], cause: Exception | None = None) -> set[int]:
        """Restart all dead workers and set them up.

        A worker that dies again during its start counts as another restart.

        Args:
            facts: what each rank's first `setup` reported.
            cause: the error that led to this call.

        Returns:
            The ranks of the new workers, which have none of the old ones' state.

        Raises:
            WorkerDiedError: the limit does not allow another restart, or a worker of another group died; names them.
            WorkerError: a new worker cannot load, or reports facts that differ from its predecessor's.
            DeadlineExceededError: the restart took longer than `start_s`.
        """
        replaced, waiting = set[int](), set[int]()
        while (dead := self.dead()) or waiting:
            waiting.update(dead)
            self._group.check_others()
            self._count(dead, cause)
            try:
                for rank in dead:
                    self._group.restart(rank)
                    self.restarted[rank] += 1
            except WorkerDiedError as error:
                cause = error
                continue
            ranks = sorted(waiting)
            answers = self._group.submit_some("setup", dict.fromkeys(ranks, ())).settle(self._start_s)
            for rank, answer in zip(ranks, answers, strict=True):
                if isinstance(answer, WorkerDiedError):
                    cause = answer
                    continue
                self._reject_another(rank, facts[rank], answer)
                waiting.remove(rank)
                replaced.add(rank)
        return replaced

    def dead(self) -> list[int]:
        """The ranks whose workers have exited."""
        return [rank for rank, alive in enumerate(self._group.workers_alive()) if not alive]

    def _count(self, dead: Sequence[int], cause: Exception | None) -> None:
        names = [self._group.describe_rank(rank) for rank in dead]
        if self.count + len(dead) > self._max_restarts:
            raise WorkerDiedError(
                f"{'; '.join(names)} exited and `{self._key}` ({self._max_restarts}) does not allow another restart; "
                f"{self.count} workers of this group were already restarted. Check their logs and the memory of their hosts. "
                "Then resume from the last checkpoint, or raise the limit." + (f"\n{cause}" if cause is not None else "")
            )
        why = f": {str(cause).splitlines()[0]}" if cause is not None and str(cause) else ""
        for name in names:
            self.count += 1
            _log.warning("%s exited; restarting it (%d of %d)%s", name, self.count, self._max_restarts, why)

    def _reject_another(self, rank: int, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        changed = {
            key: (before.get(key), now.get(key)) for key in before.keys() | now.keys() if before.get(key) != now.get(key)
        }
        if changed:
            said = "; ".join(f"{key} was {old!r} and is {new!r}" for key, (old, new) in sorted(changed.items()))
            raise WorkerError(
                f"{self._group.describe_rank(rank)}, which replaced a worker that exited, loaded something else: {said}. The "
                "files or the machine changed during the run. Restore them and resume from the last checkpoint."
            )
