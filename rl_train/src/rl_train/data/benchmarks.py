"""Layouts of public benchmarks: the fields of their rows, and the records that environments grade.

A table has the layouts, by the name of their `record_fn`. docs/evaluation.md lists the dataset cards with these fields.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.errors import DataError, format_value

Row = Mapping[str, Any]
_LETTERS = string.ascii_uppercase
_ASKED, _CHOICES = ("question", "question_stem", "ctx"), ("choices", "options", "endings")
_CHOSEN = ("answerKey", "answer_index", "answer", "label")


@dataclass(frozen=True)
class Layout:
    """The fields of a benchmark's rows, and how they become a record.

    Attributes:
        title: Names of the benchmarks.
        fields: What every row has: of each of these tuples, one field with a value.
        environment: Name of the environment that grades the answers.
        record: The record of a row; raises `DataError` for an invalid one.
    """

    title: str
    fields: tuple[tuple[str, ...], ...]
    environment: str
    record: Callable[[Row], dict[str, Any]]

    def __call__(self, row: Row) -> dict[str, Any]:
        """The record of a row; the `DataError` of an invalid one names the layout that can read it, if there is one."""
        try:
            return self.record(row)
        except DataError as error:
            if hint := layout_hint(row):
                raise DataError(f"{error}{hint}") from error
            raise

    def reads(self, row: Row) -> bool:
        """Whether it has a record for a row."""
        try:
            return bool(self.record(row))
        except DataError:
            return False

    def missing(self, row: Row) -> list[str]:
        """The fields that the row lacks; `a or b` if it needs one of them."""
        return [" or ".join(names) for names in self.fields if all(row.get(name) is None for name in names)]


def text_field(row: Row, key: str) -> str:
    """The text in a field.

    Raises:
        DataError: There is none.
    """
    value = row.get(key)
    if not isinstance(value, str):
        raise DataError(f"the field {key!r} is {format_value(value)}: expected a text, and the row has {sorted(row)}")
    return value


def _first_key(row: Row, keys: Sequence[str]) -> str:
    """The first of the keys that the row has a value of."""
    found = next((key for key in keys if row.get(key) is not None), None)
    if found is None:
        raise DataError(f"none of the fields {', '.join(map(repr, keys))} has a value: the row has {sorted(row)}")
    return found


def _lettered(question: str, texts: Sequence[str], right: int) -> dict[str, Any]:
    listed = "\n".join(f"({letter}) {text}" for letter, text in zip(_LETTERS, texts, strict=False))
    messages = [{"role": "user", "content": f"{question}\n\n{listed}"}]
    return {"messages": messages, "extra_env_info": {"expected_answer": _LETTERS[right], "choices": [*texts]}}


def _shuffled(question: str, texts: Sequence[str], right: int) -> dict[str, Any]:
    """Choices in the order of their hashes, for benchmarks whose right choice is always the first."""

    def digest(number: int) -> bytes:
        return hashlib.blake2b(f"{question}\0{texts[number]}\0{number}".encode(errors="surrogatepass")).digest()

    order = sorted(range(len(texts)), key=digest)
    return _lettered(question, [texts[number] for number in order], order.index(right))


def _choice_fields(
    title: str,
    asked: str,
    fields: tuple[str, ...],
    chosen: tuple[str, ...] = (),
    values: Mapping[str, int] | None = None,
    texts: tuple[str, ...] = (),
) -> Layout:
    """A layout with one field for each choice.

    Args:
        title: Names of the benchmarks.
        asked: The question, with the names of its fields in braces.
        fields: Fields with the texts of the choices.
        chosen: Fields of which one has the right choice. Without any, the first choice is right, and they are shuffled.
        values: Number of the choice by the value of that field, as a text in lower case.
        texts: The choices themselves, if they are the same in all rows.
    """
    in_question = tuple(name for _, name, _, _ in string.Formatter().parse(asked) if name)

    def record(row: Row) -> dict[str, Any]:
        question = asked.format_map({name: text_field(row, name).strip() for name in in_question})
        choices = texts or [text_field(row, name).strip() for name in fields]
        if values is None:
            return _shuffled(question, choices, 0)
        key = _first_key(row, chosen)
        if (right := values.get(str(row[key]).lower())) is None:
            raise DataError(f"the field {key!r} is {format_value(row[key])}: expected {' or '.join(values)}")
        return _lettered(question, choices, right)

    groups = (*((name,) for name in (*in_question, *fields)), *((chosen,) if chosen else ()))
    return Layout(title, groups, "multiple_choice", record)


def _multiple_choice(row: Row) -> dict[str, Any]:
    if isinstance(nested := row.get("question"), Mapping):
        row = {**row, "choices": nested.get("choices"), "question": nested.get("stem")}
    asked, choices, chosen = (_first_key(row, keys) for keys in (_ASKED, _CHOICES, _CHOSEN))
    given, answer = row[choices], row[chosen]
    labels, texts = (given.get("label"), given.get("text")) if isinstance(given, Mapping) else (None, given)
    if isinstance(given, list) and given and all(isinstance(one, Mapping) for one in given):
        labels, texts = ([one.get(key) for one in given] for key in ("label", "text"))
    if not isinstance(texts, list) or not 2 <= len(texts) <= len(_LETTERS) or not all(isinstance(one, str) for one in texts):
        raise DataError(f"the field {choices!r} is {format_value(given)}: expected a list of 2 to {len(_LETTERS)} texts")
    names = [*labels] if labels else [*_LETTERS[: len(texts)]]
    if len(names) != len(texts):
        raise DataError(f"the field {choices!r} has {len(texts)} texts, but {len(names)} labels")
    right = next((options.index(answer) for options in (names, texts) if answer in options), None)
    if right is None and not labels and str(answer).isdecimal():
        right = int(answer)
    if right is None or right >= len(texts):
        raise DataError(f"the field {chosen!r} is {format_value(answer)}: expected one of the {len(texts)} choices {names}")
    return _lettered(text_field(row, asked), texts, right)


def _truthfulqa(row: Row) -> dict[str, Any]:
    given = row.get("mc1_targets")
    choices, labels = (given.get(key) or () for key in ("choices", "labels")) if isinstance(given, Mapping) else ((), ())
    if len(choices) != len(labels) or [*labels].count(1) != 1 or not all(isinstance(one, str) for one in choices):
        raise DataError(f"the field 'mc1_targets' is {format_value(given)}: expected `choices` and `labels` with a single 1")
    return _shuffled(text_field(row, "question"), choices, labels.index(1))


def _triviaqa(row: Row) -> dict[str, Any]:
    answer = row.get("answer")
    accepted = answer.get("normalized_aliases") if isinstance(answer, Mapping) else None
    if not accepted:
        raise DataError(f"the field 'answer' is {format_value(answer)}: expected `value` and `normalized_aliases`")
    info = {"expected_answer": text_field(row["answer"], "value"), "aliases": accepted}
    return {"messages": [{"role": "user", "content": text_field(row, "question")}], "extra_env_info": info}


def _humaneval(row: Row) -> dict[str, Any]:
    question = (
        f"Complete this function. Write the whole program in one block.\n\n```python\n{text_field(row, 'prompt').rstrip()}\n```"
    )
    tests = {"tests": text_field(row, "test"), "entry_point": text_field(row, "entry_point")}
    return {"messages": [{"role": "user", "content": question}], "extra_env_info": tests}


def _mbpp(row: Row) -> dict[str, Any]:
    tests, imports = row.get("test_list"), row.get("test_imports") or [row.get("test_setup_code") or ""]
    if not isinstance(tests, list) or not tests or not all(isinstance(one, str) for one in [*tests, *imports]):
        raise DataError(f"the field 'test_list' is {format_value(tests)}: expected a list of assertions")
    asked, shown = text_field(row, _first_key(row, ("text", "prompt"))), "\n".join(tests)
    question = f"{asked}\n\nThe program must pass these tests:\n\n```python\n{shown}\n```"
    return {"messages": [{"role": "user", "content": question}], "extra_env_info": {"tests": [*filter(None, imports), *tests]}}


_LIKE_MMLU = "MMLU, MMLU-Pro, ARC, CommonsenseQA, OpenBookQA, HellaSwag"
_GPQA = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_BOOLEAN, _FROM_0, _FROM_1 = {"true": 0, "1": 0, "false": 1, "0": 1}, {"0": 0, "1": 1}, {"1": 0, "2": 1}
_BLANK = "{sentence}\n\nWhat does _ stand for?"
LAYOUTS: Mapping[str, Layout] = {
    "boolq": _choice_fields("BoolQ", "{passage}\n\nQuestion: {question}", (), ("answer", "label"), _BOOLEAN, ("yes", "no")),
    "gpqa": _choice_fields("GPQA", "{Question}", _GPQA),
    "humaneval": Layout("HumanEval", (("prompt",), ("test",), ("entry_point",)), "code", _humaneval),
    "mbpp": Layout("MBPP", (("text", "prompt"), ("test_list",)), "code", _mbpp),
    "multiple_choice": Layout(_LIKE_MMLU, (_ASKED, _CHOICES, _CHOSEN), "multiple_choice", _multiple_choice),
    "piqa": _choice_fields("PIQA", "{goal}", ("sol1", "sol2"), ("label",), _FROM_0),
    "triviaqa": Layout("TriviaQA", (("question",), ("answer",)), "short_answer", _triviaqa),
    "truthfulqa": Layout("TruthfulQA", (("question",), ("mc1_targets",)), "multiple_choice", _truthfulqa),
    "winogrande": _choice_fields("WinoGrande", _BLANK, ("option1", "option2"), ("answer",), _FROM_1),
}
"""Layouts by the name of their `record_fn`."""


def layout_hint(row: Row) -> str:
    """The rest of an error about a row that a layout can read; '' for other rows."""
    found = next((name for name, layout in LAYOUTS.items() if layout.reads(row)), None)
    return "" if found is None else f". It has the fields of {found}: set `record_fn: {found}`"


def nearest_layout(row: Row) -> tuple[str, str] | None:
    """The layout that lacks the fewest fields of a row, at most half, and why it cannot read the row; None without one."""
    name, found = max(LAYOUTS.items(), key=lambda item: 1 - len(item[1].missing(row)) / len(item[1].fields))
    missing = found.missing(row)
    if 2 * len(missing) > len(found.fields) or len(found.fields) - len(missing) < 2:
        return None
    try:
        found.record(row)
    except DataError as error:
        return name, f"They are nearest to {found.title}, but " + (f"lack {', '.join(missing)}" if missing else str(error))
    return None
