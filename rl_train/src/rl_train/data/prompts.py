"""Prompt templates, which turn the fields of a record into messages."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rl_core.data.formatting import format_value
from rl_core.errors import DataError

PACKAGED = Path(__file__).parent / "prompt_configs"
_KEYS = ("user", "system")


@dataclass(frozen=True, kw_only=True)
class PromptTemplate:
    """Texts in `str.format` syntax; literal braces are doubled.

    Attributes:
        user: The user message. `{name}` is replaced by a field of the record, `{}` by its input.
        system: The system message, in the same syntax; None for none.
        source: Origin of the template, for errors.
    """

    user: str
    system: str | None = None
    source: str = "prompt template"

    @property
    def names(self) -> frozenset[str]:
        """The names of the fields that it uses."""
        return frozenset(name for text in (self.user, self.system or "") for name in _fields(text, self.source) if name)

    def fill(self, record: Mapping[str, Any], *, input_key: str | None = None) -> list[dict[str, str]]:
        """The messages of a record: the system message, if there is one, and the user message.

        Args:
            record: Its fields.
            input_key: The field for `{}`.

        Raises:
            DataError: The template uses a field that is missing or is neither a text nor a number.
        """
        messages = [] if self.system is None else [{"role": "system", "content": self._filled(self.system, record, input_key)}]
        return [*messages, {"role": "user", "content": self._filled(self.user, record, input_key)}]

    def _filled(self, text: str, record: Mapping[str, Any], input_key: str | None) -> str:
        fields = _fields(text, self.source)
        if "" in fields and input_key is None:
            raise DataError(f"{self.source} uses {{}}: set its field (input_key)")
        names = [field or str(input_key) for field in fields]
        for name in names:
            if name not in record:
                raise DataError(
                    f"{self.source} uses {{{name}}}, but the record does not have this field: it has {sorted(record)} "
                    "(write {{ and }} for literal braces)"
                )
            if not isinstance(record[name], str | int | float):
                raise DataError(
                    f"{self.source} uses {{{name}}}, but this field is {format_value(record[name])}: templates need texts "
                    "and numbers. Create the text with your own `record_fn`"
                )
        lone = [record[name] for name, field in zip(names, fields, strict=True) if not field]
        return text.format(*lone, **{name: record[name] for name in names})


def load_prompt(path_or_name: str | Path) -> PromptTemplate:
    """The template of a YAML file (`user`, optional `system`), of a text file with one `{}`, or of a packaged name.

    Args:
        path_or_name: A path, or a name such as `generic/math` under the packaged `prompt_configs/`.

    Raises:
        DataError: The file or name does not exist, or is not a template.
    """
    path = _find(path_or_name)
    text = path.read_text(encoding="utf-8-sig")
    is_yaml = path.suffix in (".yaml", ".yml")
    template = _from_yaml(text, path) if is_yaml else PromptTemplate(user=text, source=str(path))
    for part in (template.user, template.system or ""):
        _fields(part, str(path))
    return template


def packaged_prompts() -> list[str]:
    """The names of the packaged templates."""
    return sorted(str(path.relative_to(PACKAGED).with_suffix("")) for path in PACKAGED.rglob("*.yaml"))


def _find(path_or_name: str | Path) -> Path:
    packaged = PACKAGED / f"{path_or_name}.yaml"
    for path in (Path(path_or_name), packaged):
        if path.is_file():
            return path
    raise DataError(f"prompt {str(path_or_name)!r} is neither a file nor a packaged name: the names are {packaged_prompts()}")


def _from_yaml(text: str, path: Path) -> PromptTemplate:
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise DataError(f"{path} is invalid YAML: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("user"), str):
        raise DataError(f"{path}: expected a mapping with the text `user` (and, if wanted, `system`)")
    if unknown := sorted(set(content) - set(_KEYS)):
        raise DataError(f"{path}: unknown keys {unknown}; known are {list(_KEYS)}")
    return PromptTemplate(user=content["user"], system=content.get("system"), source=str(path))


def _fields(text: str, source: str) -> list[str]:
    """The names in the braces, "" for `{}`."""
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as error:
        raise DataError(f"{source}: {error} (write {{{{ and }}}} for literal braces)") from error
    fields = []
    for _, field, spec, conversion in parts:
        if field is None:
            continue
        # Only names: an attribute or an index would give templates access to the record's objects.
        if (field and not field.isidentifier()) or spec or conversion:
            raise DataError(f"{source}: {{{field}}} is not a plain field name (write {{{{ and }}}} for braces)")
        fields.append(field)
    return fields
