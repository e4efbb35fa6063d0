"""Finds the origin of each value of a loaded config. Independent of the schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_core.config.source_tree import KeyPath, Node, SourceLocation, dotted
from rl_train.config.config_layout import ConfigLayout
from rl_train.config.dotted_keys import leaves_by_path


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Origin of a value.

    Attributes:
        location: The file and line, or the override; None for a default.
        interpolation: The `${...}` at `location` that produced it.
        default_of: The model or component that defines the default; None if the config sets the value.
    """

    location: SourceLocation | None = None
    interpolation: str | None = None
    default_of: str | None = None

    def __str__(self) -> str:
        if self.location is None:
            return f"default of {self.default_of}"
        return str(self.location) if self.interpolation is None else f"{self.location}, through {self.interpolation}"


def trace(
    resolved: Mapping[str, Any], *, written: Node, interpolations: Mapping[KeyPath, str], layout: ConfigLayout
) -> dict[str, Origin]:
    """The origin of every leaf of a resolved config, by its dotted key.

    Args:
        resolved: The whole config with defaults.
        written: The values of files and overrides.
        interpolations: The text of each interpolation, by its path.
        layout: The models.
    """
    return {
        dotted(path): _origin(path, written=written, interpolations=interpolations, layout=layout)
        for path, _ in leaves_by_path(resolved)
    }


def _origin(path: KeyPath, *, written: Node, interpolations: Mapping[KeyPath, str], layout: ConfigLayout) -> Origin:
    for length in range(len(path), 0, -1):
        if path[:length] in interpolations:
            return Origin(location=written.nearest(path).location, interpolation=interpolations[path[:length]])
    if written.at(path) is not None:
        return Origin(location=written.nearest(path).location)
    section = layout.sections.get(path[:-1])
    if section is not None and path[-1] in section.implied:
        loss_of = layout.algorithm if path[0] == "loss_fn" else None
        return Origin(default_of=f"{dotted(path[:-1])}" if loss_of is None else f"the algorithm {loss_of}")
    field = layout.find(path)
    return Origin(default_of=field.owner.__name__ if field is not None else dotted(path[:-1]))
