"""Finds the files and folders that a config names, by the rules of `rl_core.config.paths`, and reports missing ones."""

from __future__ import annotations

import os
from typing import Any

from rl_core.config.diagnostics import Problems, show
from rl_core.config.paths import PathRule
from rl_core.config.source_tree import KeyPath, Node
from rl_train.config.config_layout import ConfigLayout
from rl_train.path_lookup import folders, leads_into_folder, locate, looks_like_path

_MODELS = ("model_name", "name", "tokenizer_name")
_ON_THE_HUB = {"path": ", or the name of a dataset on the hub"} | dict.fromkeys(_MODELS, ", or the name of a model on the hub")
"""What else a key accepts besides a path."""


def locate_paths(values: dict[str, Any], layout: ConfigLayout, *, written: Node, problems: Problems) -> None:
    """Makes every marked path absolute, in place; a name that is not a file is unchanged.

    Args:
        values: The plain values.
        layout: Determines which keys may contain paths.
        written: The same values with their source locations: paths are relative to the file that contains them.
        problems: Receives paths that do not exist.
    """
    for field in layout.fields():
        rule = next((item for item in field.info.metadata if isinstance(item, PathRule)), None)
        if rule is None:
            continue
        *parents, key = field.path
        section = _section(values, tuple(parents))
        text = section.get(str(key))
        if not isinstance(text, str) or problems.is_invalid(field.path):
            continue
        location = written.nearest(field.path).location
        found = locate(text, location=location)
        if found is not None:
            section[str(key)] = found
        elif rule.must_exist or looks_like_path(text) or (key in _MODELS and leads_into_folder(text, location=location)):
            searched = "" if os.path.isabs(os.path.expanduser(text)) else f" in {' or in '.join(folders(location))}"
            other = "" if rule.must_exist else _ON_THE_HUB.get(str(key), "")
            message = f"{show(text)} does not exist{searched}. Give an existing path{other}."
            problems.mark_invalid(message, location=location, path=field.path)


def _section(values: Any, path: KeyPath) -> dict[str, Any]:
    """The section itself, to be changed; an empty one if there is none."""
    for part in path:
        values = values.get(part) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else {}
