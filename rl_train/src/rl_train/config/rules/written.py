"""Rules about keys as they were written, which are checked before the values are validated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rl_core.config.diagnostics import Problem, show
from rl_core.config.introspection import holds_free_keys, inner_annotation
from rl_core.config.source_tree import KeyPath, dotted
from rl_train.config.rules.rule import Stage, WrittenConfig, rule
from rl_train.config.slots import FUNCTION_KEYS


@rule("overrides", stage=Stage.WRITTEN)
def overridden_items_are_in_lists(config: WrittenConfig) -> Iterator[Problem]:
    """An override of one item of a list needs a list that a file or an earlier override sets."""
    for override in config.overrides:
        for length, part in enumerate(override.path):
            path = override.path[:length]
            if _is_index_of_missing_list(config, path, part):
                default = config.layout.default(path)
                hint = f" Its default is {default}." if isinstance(default, list) else ""
                plus = "++" if override.adds else ""
                yield Problem(
                    path,
                    f"no file sets this list, so it has no item {part}: set the whole list, {plus}{dotted(path)}=[...].{hint}",
                    override.location,
                )
                break


def _is_index_of_missing_list(config: WrittenConfig, path: KeyPath, part: str | int) -> bool:
    holder = config.written.at(path)
    # Overrides create a missing container as a mapping; one that a file sets is that file's mistake.
    if holder is None or not isinstance(holder.value, dict) or holder.location.number is None or not str(part).isdecimal():
        return False
    return isinstance(part, int) or _is_list(config, path)


def _is_list(config: WrittenConfig, path: KeyPath) -> bool:
    field = config.layout.find(path)
    if field is None or field.is_free:
        return False
    annotation = field.info.annotation
    return inner_annotation(annotation, (0,)) is not Any and not holds_free_keys(annotation)


@rule("overrides", stage=Stage.WRITTEN)
def overrides_add_keys_with_two_pluses(config: WrittenConfig) -> Iterator[Problem]:
    """`key=value` sets a key that exists in a file or the schema; `++key=value` also adds one to a section with free keys."""
    for override in config.overrides:
        lengths = range(override.known + 1, len(override.path) + 1)
        added = next((override.path[:length] for length in lengths if config.layout.takes_any(override.path[:length])), None)
        if added is not None and not override.adds:
            meant = [key for key in config.layout.ending_in(str(added[-1])) if key[:-1] == added[:-1]]
            yield Problem(
                override.path,
                f"{dotted(added)} exists neither in the file nor in the schema: "
                + (f"did you mean {dotted(meant[0])}? To" if meant else "to")
                + f" add it, write ++{dotted(override.path)}=...",
                override.location,
            )


@rule("env", stage=Stage.WRITTEN)
def reward_functions_are_used(config: WrittenConfig) -> Iterator[Problem]:
    """`reward_fn` and `reward_fns` are not set next to the `name` of an environment that does not have these keys."""
    for path, part in config.layout.sections.items():
        if path[:-1] != ("env",) or part.component is None or part.is_open:
            continue
        section = config.values["env"][path[1]] or {}
        name = section.get("name")
        for key in FUNCTION_KEYS:
            if name is None or key not in section or key in part.model.model_fields:
                continue
            where = (*path, key)
            yield Problem(
                where,
                f"the environment {show(name)} of this task ({dotted((*path, 'name'))}) takes no reward functions: remove "
                f"`name` to score with the functions only, or remove `{key}` to score with {show(name)}.",
                config.written.nearest(where).key_location,
            )
