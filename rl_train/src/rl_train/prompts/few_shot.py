"""Chooses the few-shot examples of a row: a fixed list, or the nearest rows of a file. Never the row itself."""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from rl_core.errors import DataError
from rl_train.prompts.example_lists import find_examples, read_examples
from rl_train.prompts.prompt_files import BM25S, FewShotExamples, check_fields, needed_fields

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
        examples, search = _index(self._path, _modified(self._path), self._field, tuple(needed_fields(self._config)))
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


def _modified(path: Path) -> int:
    """Time of the last change in nanoseconds; 0 for a file that does not exist, which is reported when it is read."""
    return path.stat().st_mtime_ns if path.exists() else 0


def _words(text: str) -> list[str]:
    return _TOKEN.findall(unicodedata.normalize("NFKC", text).casefold())
