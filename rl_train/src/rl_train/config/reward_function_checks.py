"""Checks that reward functions are used: a task that selects another environment by name cannot have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_core.config.diagnostics import Problems, show
from rl_core.config.source_tree import Node, dotted
from rl_train.config.config_layout import ConfigLayout
from rl_train.config.slots import FUNCTION_KEYS


def reject_unused_functions(values: Mapping[str, Any], layout: ConfigLayout, *, written: Node, problems: Problems) -> None:
    """Reports `reward_fn` and `reward_fns` next to the `name` of an environment that does not have these keys."""
    for path, schema in layout.sections.items():
        if path[:-1] != ("env",) or schema.component is None or schema.is_open:
            continue
        section = values["env"][path[1]] or {}
        name = section.get("name")
        for key in FUNCTION_KEYS:
            if name is None or key not in section or key in schema.model.model_fields:
                continue
            where = (*path, key)
            problems.mark_invalid(
                f"the environment {show(name)} of this task ({dotted((*path, 'name'))}) takes no reward functions: remove "
                f"`name` to score with the functions only, or remove `{key}` to score with {show(name)}.",
                location=written.nearest(where).key_location,
                path=where,
            )
