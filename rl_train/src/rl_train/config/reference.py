"""The config reference page: one table per section, generated from the models and their docstrings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rl_core.config.introspection import NO_DEFAULT, Field, Model, all_fields
from rl_core.config.source_tree import KeyPath, dotted
from rl_train.config.schema_index import ANY, SchemaIndex
from rl_train.config.section_resolver import COMPANIONS, SectionSchema

_SAME_AS_TRAIN = (("data", "validation"), ("data", "validation_sets"), ("data", "mix"))
_SLOTS = (("policy", "generation"), ("data", "train"), *_SAME_AS_TRAIN)
_HEAD = """# Config reference

Every section and key, with its default and allowed values. See `docs/config.md` for files, overrides and `${...}`.

This page is generated from the models: `rlcore schema --markdown --plugins {plugins} --output docs/config_reference.md`.
"""


def reference(schema_index: SchemaIndex, *, plugins: str) -> str:
    """The config reference as Markdown.

    Args:
        schema_index: The sections.
        plugins: The plugins in the index, for the command shown on the page.
    """
    lines = [_HEAD.replace("{plugins}", plugins)]
    parts = [part for part in schema_index.parts if part.path[:2] not in _SAME_AS_TRAIN and part.path[0] not in COMPANIONS]
    # Built-in sections first, then components by key. The load order of plugins is arbitrary.
    for part in sorted(parts, key=lambda part: (part.component is not None, dotted(part.path), _name(part))):
        lines.append(_heading(part))
        lines.extend(_table(part))
    return "\n".join(lines).rstrip() + "\n"


def _name(part: SectionSchema) -> str:
    return "" if part.component is None else part.component.name


def _heading(part: SectionSchema) -> str:
    key = dotted(part.path).replace(ANY, "<task>")
    if part.component is None or part.kind is None:
        return f"## `{key}`\n\n{_first_line(part.model)}\n"
    shared_by: dict[KeyPath, list[str]] = {
        ("data", "train"): ["data.train", "data.validation", "data.validation_sets.<name>", "data.mix.<name>"],
        ("policy",): ["policy", *COMPANIONS],
    }
    where = " and ".join(", ".join(f"`{each}`" for each in shared_by.get(part.path, [key])).rsplit(", ", 1))
    return f"## {where}: {part.kind.label} `{part.component.name}`\n\n{part.component.summary}.\n"


def _first_line(model: Model) -> str:
    return (model.__doc__ or "").strip().split("\n")[0]


def _table(part: SectionSchema) -> Iterator[str]:
    fields = [*all_fields(part.model, prefix=part.path)]
    rows = [field for field in fields if not _has_own_table(field, part) and (field.model is None or field.default is None)]
    yield "| key | default | allowed | meaning |"
    yield "|---|---|---|---|"
    for field in rows:
        key = dotted(field.path[len(part.path) :])
        meaning = _cell(field.info.description or "")
        yield f"| `{key}` | {_default(field)} | {_cell(field.allowed)} | {meaning} |"
    yield ""


def _has_own_table(field: Field, part: SectionSchema) -> bool:
    """Whether the key belongs to a section of another component, which has its own table."""
    return any(len(field.path) > len(slot) > len(part.path) and field.path[: len(slot)] == slot for slot in _SLOTS)


def _default(field: Field) -> str:
    if field.default is NO_DEFAULT:
        return "required"
    return f"`{_cell(_yaml(field.default))}`"


def _yaml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")
