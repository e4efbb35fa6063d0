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
    """The row with the nested fields of these names in addition, except those that it lacks."""
    found = {name: value for name in names if (value := field_value(row, name)) is not None}
    return {**row, **found} if found else row
