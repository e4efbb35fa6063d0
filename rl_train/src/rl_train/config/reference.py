"""The config reference page: one table per section, generated from the models and their docstrings."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rl_core.config.introspection import NO_DEFAULT, Field
from rl_core.config.source_tree import dotted
from rl_train.config.config_layout import SectionSchema
from rl_train.config.schema_index import SchemaIndex
from rl_train.config.slots import ANY, SLOTS, slots_of

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
    # One table for each component, at the first slot of its kind.
    same_as_first = [slot.path for slot in SLOTS if slot is not slots_of(slot.kind)[0]]
    sections = [section for section in schema_index.sections if section.path not in same_as_first]
    # Built-in sections first, then components by key. The load order of plugins is arbitrary.
    for section in sorted(sections, key=lambda section: (section.component is not None, dotted(section.path), _name(section))):
        lines.append(_heading(section))
        lines.extend(_table(section))
    return "\n".join(lines).rstrip() + "\n"


def _name(section: SectionSchema) -> str:
    return "" if section.component is None else section.component.name


def _heading(section: SectionSchema) -> str:
    if section.component is None or section.kind is None:
        first_line = (section.model.__doc__ or "").strip().split("\n")[0]
        return f"## `{dotted(section.path)}`\n\n{first_line}\n"
    slots = [slot.path for slot in slots_of(section.kind)]
    keys = slots if section.path in slots else [section.path]
    names = [f"`{dotted(key)}`".replace(f"env.{ANY}", "env.<task>") for key in keys]
    where = " and ".join(", ".join(names).rsplit(", ", 1))
    return f"## {where}: {section.kind.label} `{section.component.name}`\n\n{section.component.summary}.\n"


def _table(section: SectionSchema) -> Iterator[str]:
    shown = [
        field
        for field in section.fields()
        if not _has_own_table(field, section) and (field.model is None or field.default is None)
    ]
    yield "| key | default | allowed | meaning |"
    yield "|---|---|---|---|"
    for field in shown:
        key = dotted(field.path[len(section.path) :])
        meaning = _cell(field.info.description or "")
        yield f"| `{key}` | {_default(field)} | {_cell(field.allowed)} | {meaning} |"
    yield ""


def _has_own_table(field: Field, section: SectionSchema) -> bool:
    """Whether the key belongs to a section of another component, which has its own table."""
    depths = range(len(section.path) + 1, len(field.path))
    return any(slot.path == field.path[:depth] for depth in depths for slot in SLOTS)


def _default(field: Field) -> str:
    if field.default is NO_DEFAULT:
        return "required"
    return f"`{_cell(json.dumps(field.default, ensure_ascii=False))}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")
