"""What decides the result of a run in addition to its config: user code, models, templates and data, as digests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

ROWS: Final = "the rows"
"""Name of the digest of a dataset's rows."""
_MOST_NAMED: Final = 3

Inputs = Mapping[str, Mapping[str, str]]
"""The digests of what the value of a config key refers to, by key and by name, such as `score in my_rewards.py`."""


def inputs_in(state: Mapping[str, Any]) -> Inputs:
    """The inputs in the state of a checkpoint; empty if a version that did not record them wrote it."""
    inputs: Inputs = state.get("inputs", {})
    return inputs


def input_changes(old: Inputs, new: Inputs) -> dict[str, str]:
    """What has changed, in words, by config key; only keys that both have are compared."""
    changes = {}
    for key in sorted(old.keys() & new.keys()):
        then, now = old[key], new[key]
        names = sorted(name for name in {**then, **now} if then.get(name) != now.get(name))
        if names:
            verbs = ("was added" if name not in then else "changed" if name in now else "was removed" for name in names)
            shown = [f"{name} {verb}" for name, verb in zip(names, verbs, strict=True)]
            more = f", and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            changes[key] = ", ".join(shown[:_MOST_NAMED]) + more
    return changes
