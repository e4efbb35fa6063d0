"""Prompt templates, which turn the fields of a record into messages, with few-shot examples.

The examples of a row are a fixed list, or the nearest rows of a file; never the row itself.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from rl_core.errors import DataError, format_value
from rl_core.plugins.component import did_you_mean
from rl_train.prompts.prompt_files import (
    BM25S,
    EXAMPLES,
    FewShotExamples,
    check_fields,
    find_examples,
    find_prompt,
    needed_fields,
    placeholders,
    read_examples,
    read_prompt,
)

_log = logging.getLogger("rlcore")

Example = Mapping[str, Any]

_TOKEN = re.compile(r"\w+|[^\w\s]")


@lru_cache(maxsize=16_384)  # examples are compared with every row
def normalized(value: str) -> str:
    r"""A text without differences that do not change a question: case, white space, quotes, `$` and other punctuation.

    Kept are letters, digits, symbols and the arithmetic signs, and points and commas within numbers, so that `2 + 2?` and
    `$2+2$` are equal, but `2-2` and `2+2` are not.
    """
    text = unicodedata.normalize("NFKC", value).casefold()
    kept = []
    for index, char in enumerate(text):
        category = unicodedata.category(char)
        is_decimal_sign = char in ".," and text[index + 1 : index + 2].isdigit()
        if category == "Pd" or char == "\u2212":
            kept.append("-")
        elif category[0] in "LMN" or (category[0] == "S" and char not in "$`") or char in "*/%!" or is_decimal_sign:
            kept.append(char)
    return "".join(kept) or text.strip()


def asks_the_same(example: Example, question: Mapping[str, Any]) -> bool:
    """Whether an example has the question of a row, in fields of the same or of other names.

    Args:
        example: The example.
        question: The fields of the row that its prompt shows.
    """
    shared = [name for name in question if name in example]
    if shared and all(normalized(str(example[name])) == normalized(str(question[name])) for name in shared):
        return True
    asked = {normalized(str(value)) for value in question.values()}
    return bool(asked) and asked <= {normalized(str(value)) for value in example.values()}


class FixedExamples:
    """The same examples for every row, without those that have the question of the row.

    Args:
        examples: The examples; none for checks that must not read a large file.
        needs: The fields of a row that the choice needs; those of the choice that it replaces, if it replaces one.
    """

    def __init__(self, examples: Sequence[Example], *, needs: frozenset[str] = frozenset()) -> None:
        self._examples, self.needs = examples, needs

    def choose(self, row: Mapping[str, Any], question: Mapping[str, Any]) -> list[Example]:
        """The examples for a row, in their order; `question` has the fields of the row that its prompt shows."""
        return [example for example in self._examples if not asks_the_same(example, question)]


class NearestExamples:
    """The rows of a file that are most similar to a row, by BM25 over the words of one field; ties by their order.

    Left out are the row itself (an example with the same normalized question), repeated questions, and examples over the
    length limit. The file is read and indexed at the first use.

    Args:
        config: The field, the file and the limits.

    Attributes:
        needs: The fields of a row that the search needs.
    """

    def __init__(self, config: FewShotExamples) -> None:
        assert config.retrieval_field is not None
        assert config.retrieval_file is not None
        self._config = config
        self._field = config.retrieval_field
        self._path = Path(config.retrieval_file)
        self.needs = frozenset({config.retrieval_field})
        self._has_warned = False

    def choose(self, row: Mapping[str, Any], question: Mapping[str, Any]) -> list[Example]:
        """The examples for a row, the nearest last; `question` has the fields of the row that its prompt shows.

        Raises:
            DataError: The file cannot be read, an example lacks a field, or bm25s is not installed.
        """
        modified = self._path.stat().st_mtime_ns if self._path.exists() else 0  # a missing file is reported when it is read
        examples, search = _index(self._path, modified, self._field, tuple(needed_fields(self._config)))
        wanted = self._config.retrieved_few_shots
        key, seen = normalized(str(row[self._field])), set[str]()
        chosen: list[Example] = []
        for number in search.ranked(str(row[self._field])):
            example = examples[number]
            own = normalized(str(example[self._field]))
            if own == key or own in seen or asks_the_same(example, question):
                continue
            seen.add(own)
            if not self._is_too_long(example):
                chosen.append(example)
            if len(chosen) == wanted or len(seen) == self._config.retrieved_entries:
                break
        if len(chosen) < wanted and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s has only %d few-shot examples, not %d, for the row with %s %r (reported once)",
                self._path,
                len(chosen),
                wanted,
                self._field,
                str(row[self._field])[:80],
            )
        return chosen[::-1]

    def _is_too_long(self, example: Example) -> bool:
        limit = self._config.max_retrieved_chars
        return limit is not None and len(str(example[self._config.max_retrieved_chars_field])) >= limit


class Bm25:
    """Ranks texts by their BM25 score for a query.

    Args:
        texts: The texts.

    Raises:
        DataError: bm25s is not installed.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        try:
            import bm25s
        except ImportError as error:
            raise DataError(f"searching for the nearest examples needs the package bm25s: {BM25S}") from error
        # Numbered by first occurrence: bm25s numbers the words of a set, whose order differs between processes.
        self._numbers: dict[str, int] = {}
        ids = [[self._numbers.setdefault(word, len(self._numbers)) for word in _words(text)] for text in texts]
        self._index = bm25s.BM25(dtype="float64") if self._numbers else None
        self._count = len(texts)
        if self._index is not None:
            self._index.index((ids, dict(self._numbers)), show_progress=False, create_empty_token=False)

    def ranked(self, query: str) -> list[int]:
        """The numbers of all texts, the most similar first; texts with equal scores in their order."""
        known = [self._numbers[word] for word in _words(query) if word in self._numbers]
        if self._index is None or not known:
            return list(range(self._count))
        scores = self._index.get_scores(known)
        return list((-scores).argsort(kind="stable").tolist())


def select_examples(config: FewShotExamples | None) -> FixedExamples | NearestExamples | None:
    """The examples that a prompt config selects; None if it selects none.

    Raises:
        DataError: The examples do not exist or lack a field of the template.
    """
    if config is None or not config.are_chosen:
        return None
    if config.retrieval_field is not None:
        return NearestExamples(config)
    examples = config.examples or read_examples(find_examples(str(config.examples_type)))
    check_fields(examples, needed_fields(config))
    return FixedExamples(list(examples))


@lru_cache(maxsize=8)
def _index(path: Path, modified: int, field: str, needed: tuple[str, ...]) -> tuple[list[dict[str, Any]], Bm25]:
    """The examples of a file and their index. Cached, because several datasets of a run may use the same file."""
    examples = read_examples(path)
    try:
        check_fields(examples, list(needed))
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    return examples, Bm25([str(example[field]) for example in examples])


def _words(text: str) -> list[str]:
    return _TOKEN.findall(unicodedata.normalize("NFKC", text).casefold())


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
