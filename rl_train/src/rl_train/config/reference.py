"""The config reference page: one table per section, generated from the models and their docstrings."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

from rl_core.config.introspection import NO_DEFAULT, Field, Model, declaring_model
from rl_core.config.source_tree import dotted
from rl_core.plugins.component import Kind
from rl_train.config.config_layout import SectionSchema
from rl_train.config.schema_index import SchemaIndex
from rl_train.config.slots import ANY, SLOTS, slots_of

_HEAD = """# Config reference

Every section and key, with its default and allowed values. See `docs/config.md` for files, overrides and `${...}`.

A component has the keys of its table and of each table above that names it or all components of its kind. If both have a
key, its own counts.

This page is generated from the models: `rlcore schema --markdown --plugins {plugins} --output docs/config_reference.md`.
"""


def reference(schema_index: SchemaIndex, *, plugins: str) -> str:
    """The config reference as Markdown.

    Args:
        schema_index: The sections.
        plugins: The plugins in the index, for the command shown on the page.
    """
    # One table for each component, at the first slot of its kind.
    same_as_first = [slot.path for slot in SLOTS if slot is not slots_of(slot.kind)[0]]
    sections = [section for section in schema_index.sections if section.path not in same_as_first]
    lines = [_HEAD.replace("{plugins}", plugins)]
    for section in sorted((each for each in sections if each.component is None), key=lambda each: dotted(each.path)):
        lines.extend([_heading(section), *_table([row for row, _ in _rows_with_owner(section)])])
    for kind in sorted({section.kind for section in sections if section.kind}, key=lambda kind: dotted(slots_of(kind)[0].path)):
        members = sorted((section for section in sections if section.kind is kind), key=_name)
        lines.append(_heading_of_kind(kind))
        inherited = _inherited_rows(members)
        for base, rows in inherited.items():
            lines.extend([_heading_of_base(base, kind, members), *_table(rows)])
        for section in members:
            own = [row for row, owner in _rows_with_owner(section) if row not in inherited.get(owner, [])]
            lines.extend([_heading(section), *_table(own)])
    return "\n".join(lines).rstrip() + "\n"


def _inherited_rows(sections: list[SectionSchema]) -> dict[Model, list[str]]:
    """The rows that several components have from the same base of their models, by base."""
    counts = Counter(row_and_owner for section in sections for row_and_owner in _rows_with_owner(section))
    inherited: dict[Model, list[str]] = {}
    for (row, owner), number in counts.items():
        if number > 1:
            inherited.setdefault(owner, []).append(row)
    return inherited


def _name(section: SectionSchema) -> str:
    return "" if section.component is None else section.component.name


def _heading(section: SectionSchema) -> str:
    if section.component is None or section.kind is None:
        first_line = (section.model.__doc__ or "").strip().split("\n")[0]
        return f"## `{dotted(section.path)}`\n\n{first_line}\n"
    return f"### {section.kind.label.capitalize()} `{section.component.name}`\n\n{section.component.summary}.\n"


def _heading_of_kind(kind: Kind) -> str:
    places = [f"`{dotted(slot.path)}`".replace(f"env.{ANY}", "env.<task>") for slot in slots_of(kind)]
    sections = f"Section{'s' if len(places) > 1 else ''} {_enumerated(places)}"
    return f"## {_plural(kind).capitalize()}\n\n{sections}.\n"


def _heading_of_base(base: Model, kind: Kind, sections: list[SectionSchema]) -> str:
    sharing = [section for section in sections if issubclass(section.model, base)]
    names = f"all {_plural(kind)}" if sharing == sections else _enumerated([f"`{_name(section)}`" for section in sharing])
    return f"### Keys of {names}\n"


def _plural(kind: Kind) -> str:
    return kind.label + ("es" if kind.label.endswith("s") else "s")


def _enumerated(words: list[str]) -> str:
    return " and ".join(", ".join(words).rsplit(", ", 1))


def _rows_with_owner(section: SectionSchema) -> Iterator[tuple[str, Model]]:
    """The rows of a section's table, each with the model that declares its outermost key."""
    for field in section.fields():
        if not _has_own_table(field, section) and (field.model is None or field.default is None):
            path = field.path[len(section.path) :]
            meaning = _cell(field.info.description or "")
            row = f"| `{dotted(path)}` | {_default(field)} | {_cell(field.allowed)} | {meaning} |"
            yield row, declaring_model(section.model, str(path[0]))


def _table(rows: list[str]) -> Iterator[str]:
    if not rows:
        return
    yield "| key | default | allowed | meaning |"
    yield "|---|---|---|---|"
    yield from rows
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
