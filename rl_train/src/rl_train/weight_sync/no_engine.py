"""Weight synchronization of a run without an engine, such as the replay of another run."""

from __future__ import annotations


class NoEngine:
    """Sends nothing; algorithms call `sync` as if there were an engine."""

    def sync(self, *, only_if_stale: bool = False) -> dict[str, float]:
        """Does nothing.

        Returns:
            No metrics.
        """
        return {}
