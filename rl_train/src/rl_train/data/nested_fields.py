"""Fields within fields: `reward_model.ground_truth` is the key `ground_truth` of the field `reward_model`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def field_value(row: Mapping[str, Any], name: str) -> Any:
    """The value of a field, which may be nested; None if the row has none. A field with exactly this name takes precedence."""
    value: Any = row
    for key in [name] if name in row else name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def with_nested_fields(row: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The row with the nested fields of these names in addition, even if they are null, except those that it lacks."""
    found = {}
    for parent, _, key in (name.rpartition(".") for name in names if name not in row):
        if isinstance(fields := field_value(row, parent), Mapping) and key in fields:
            found[f"{parent}.{key}"] = fields[key]
    return {**row, **found}
