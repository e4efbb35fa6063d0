"""Checks of overrides that need the schema: `key=value` must not add keys, and an index needs a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_core.config.diagnostics import Problems
from rl_core.config.introspection import holds_free_keys, inner_annotation
from rl_core.config.source_tree import KeyPath, Node, dotted
from rl_train.config.config_layout import ConfigLayout
from rl_train.config.overrides import Override


def reject_items_of_missing_lists(
    applied: Sequence[Override], layout: ConfigLayout, *, written: Node, problems: Problems
) -> None:
    """Reports overrides of one item of a list that neither a file nor an earlier override sets."""
    for override in applied:
        for length, part in enumerate(override.path):
            path = override.path[:length]
            if _is_index_of_missing_list(path, part, layout, written=written):
                default = layout.default(path)
                hint = f" Its default is {default}." if isinstance(default, list) else ""
                plus = "++" if override.adds else ""
                problems.mark_invalid(
                    f"no file sets this list, so it has no item {part}: set the whole list, {plus}{dotted(path)}=[...].{hint}",
                    location=override.location,
                    path=path,
                )
                break


def _is_index_of_missing_list(path: KeyPath, part: str | int, layout: ConfigLayout, *, written: Node) -> bool:
    holder = written.at(path)
    # Overrides create a missing container as a mapping; one that a file sets is that file's mistake.
    if holder is None or not isinstance(holder.value, dict) or holder.location.number is None or not str(part).isdecimal():
        return False
    return isinstance(part, int) or _is_list(path, layout)


def _is_list(path: KeyPath, layout: ConfigLayout) -> bool:
    field = layout.find(path)
    if field is None or field.is_free:
        return False
    annotation = field.info.annotation
    return inner_annotation(annotation, (0,)) is not Any and not holds_free_keys(annotation)


def reject_new_keys(applied: Sequence[Override], layout: ConfigLayout, *, problems: Problems) -> None:
    """Reports `key=value` overrides that would add a key; adding requires `++`."""
    for override in applied:
        if override.adds:
            continue
        for length in range(override.known + 1, len(override.path) + 1):
            path = override.path[:length]
            if layout.takes_any(path):
                problems.add(
                    f"{dotted(path)} exists neither in the file nor in the schema: to add it, write "
                    f"++{dotted(override.path)}=...",
                    location=override.location,
                    path=override.path,
                )
                break
