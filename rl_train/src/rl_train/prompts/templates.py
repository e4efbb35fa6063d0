"""Prompt templates, which turn the fields of a record into messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl_core.errors import DataError, format_value
from rl_core.plugins.component import did_you_mean
from rl_train.prompts.few_shot import FixedExamples, NearestExamples, select_examples
from rl_train.prompts.prompt_files import EXAMPLES, FewShotExamples, find_prompt, placeholders, read_prompt


@dataclass(frozen=True, kw_only=True)
class PromptTemplate:
    """Texts in `str.format` syntax; literal braces are doubled.

    Attributes:
        user: The user message. `{name}` is replaced by a field of the record, `{}` by its input, `{examples}` by the few-shot
            examples.
        system: The system message, in the same syntax; None for none.
        few_shot: Texts around the examples and of each one; None if the user message has no examples.
        selector: Chooses the examples of a record; without it, `{examples}` is empty.
        source: Origin of the template, for errors.
        path: Its file, for errors; None for a template that is not from a file.
    """

    user: str
    system: str | None = None
    few_shot: FewShotExamples | None = None
    selector: FixedExamples | NearestExamples | None = None
    source: str = "prompt template"
    path: Path | None = None

    @property
    def names(self) -> frozenset[str]:
        """The names of the fields of the record in its texts."""
        used = {name for text in (self.user, self.system or "") for name in _fields(text, self.source) if name}
        return frozenset(used - self._own)

    @property
    def needs(self) -> frozenset[str]:
        """The names of all fields of the record that it uses, also those that choose examples."""
        return self.names if self.selector is None else self.names | self.selector.needs

    def without_examples(self) -> PromptTemplate:
        """The template with an empty `{examples}`, which needs the same fields."""
        return self if self.selector is None else replace(self, selector=FixedExamples([], needs=self.selector.needs))

    def fill(self, record: Mapping[str, Any], *, input_key: str | None = None) -> list[dict[str, str]]:
        """The messages of a record: the system message, if there is one, and the user message.

        Args:
            record: Its fields.
            input_key: The field for `{}`.

        Raises:
            DataError: The template uses a field that is missing or is neither a text nor a number, or an example cannot be
                chosen.
        """
        if self._own & record.keys():
            raise DataError(
                f"the record has a field {EXAMPLES!r}, but {self.source} uses {{{EXAMPLES}}} for its few-shot examples: rename "
                "the field"
            )
        messages = [] if self.system is None else [{"role": "system", "content": self._filled(self.system, record, input_key)}]
        return [*messages, {"role": "user", "content": self._filled(self.user, record, input_key)}]

    @property
    def _own(self) -> frozenset[str]:
        """The placeholders that are not fields of the record."""
        return frozenset() if self.few_shot is None else frozenset({EXAMPLES})

    def _examples(self, record: Mapping[str, Any], input_key: str | None) -> str:
        few_shot = self.few_shot
        if few_shot is None or self.selector is None:
            return ""
        asked = [name or str(input_key) for name in _fields(self.user, self.source) if name != EXAMPLES]
        for name in (*asked, *sorted(self.selector.needs)):
            self._check_field(name, record)
        chosen = self.selector.choose(record, {name: record[name] for name in asked})
        texts = [few_shot.template.format(**example) for example in chosen]
        return f"{few_shot.prefix}{''.join(texts)}{few_shot.suffix}" if texts else ""

    def _filled(self, text: str, record: Mapping[str, Any], input_key: str | None) -> str:
        fields = _fields(text, self.source)
        if "" in fields and input_key is None:
            raise DataError(f"{self.source} uses {{}}: set its field (input_key)")
        names = [field or str(input_key) for field in fields if field not in self._own]
        for name in names:
            self._check_field(name, record)
        lone = [record[str(input_key)] for field in fields if not field]
        own = {name: self._examples(record, input_key) for name in fields if name in self._own}
        return text.format(*lone, **{name: record[name] for name in names}, **own)

    def _check_field(self, name: str, record: Mapping[str, Any]) -> None:
        if name not in record:
            meant = did_you_mean(name, sorted(record))
            raise DataError(
                f"{self._location_of(name)} uses {{{name}}}, but the record does not have this field: it has {sorted(record)}"
                f"{'.' if meant else ''}{meant} (write {{{{ and }}}} for literal braces)"
            )
        if not isinstance(record[name], str | int | float):
            raise DataError(
                f"{self._location_of(name)} uses {{{name}}}, but this field is {format_value(record[name])}: templates need "
                "texts and numbers. Create the text with your own `record_fn`"
            )

    def _location_of(self, name: str) -> str:
        """The source, and the line of its file that uses a field."""
        texts = [line.strip() for text in (self.user, self.system or "") for line in text.splitlines() if f"{{{name}}}" in line]
        lines = [] if self.path is None else self.path.read_text(encoding="utf-8-sig").splitlines()
        found = next((number for number, line in enumerate(lines, start=1) if any(text in line for text in texts)), None)
        return self.source if found is None else f"{self.source}:{found}"


def load_prompt(path_or_name: str | Path, examples_type: str | None = None) -> PromptTemplate:
    """The template of a prompt config: a YAML file, a text file with one `{}`, or a packaged name such as `generic/math`.

    Args:
        path_or_name: The path or name.
        examples_type: Name or path of few-shot examples, replacing the `examples_type` of the file.

    Raises:
        DataError: The file or name does not exist, or is not a prompt config.
    """
    prompt = read_prompt(path_or_name, examples_type)
    return PromptTemplate(
        user=prompt.user,
        system=prompt.system,
        few_shot=prompt.few_shot_examples,
        selector=select_examples(prompt.few_shot_examples),
        source=str(path_or_name),
        path=find_prompt(path_or_name),
    )


def _fields(text: str, source: str) -> list[str]:
    """The names in the braces, "" for `{}`."""
    try:
        fields = placeholders(text)
    except ValueError as error:
        raise DataError(f"{source}: {error} (write {{{{ and }}}} for literal braces)") from error
    named = next((field for field in fields if field not in ("", EXAMPLES)), None)
    if "" in fields and named is not None:
        raise DataError(f"{source} uses both {{}} and {{{named}}}: write {{{{}}}} for literal braces, or name the field")
    return fields
