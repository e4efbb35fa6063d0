"""Names that users cannot give to rewards and metrics, because the runtime reports metrics of the same keys."""

from __future__ import annotations

from collections.abc import Iterable

REWARDS = frozenset({"mean", "std", "group_std", "clipped_frac", "overlong", "shaped"})
"""Names in the metrics `reward/<name>`."""
ENVIRONMENT_METRICS = frozenset({"wait_s", "step_s"})
"""Names in the metrics `env/<task>/<name>`."""


def reserved_reward(names: Iterable[object]) -> str | None:
    """What is wrong with the first reserved name of a reward; None if there is none."""
    found = next((name for name in names if name in REWARDS), None)
    if found is None:
        return None
    return f"the name {found!r} is reserved: `reward/{found}` is a metric of every reward. Choose another name"
