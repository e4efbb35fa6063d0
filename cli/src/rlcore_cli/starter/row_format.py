"""Recognizes what the rows of a data file are, from the names and types of their fields."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_core.errors import ConfigError, DataError

Row = Mapping[str, Any]

_QUESTIONS = ("question", "problem", "prompt", "query", "instruction", "input")
ANSWERS = ("expected_answer", "answer", "final_answer", "ground_truth", "solution", "target", "label")
_RESPONSES = ("response", "completion", "output")
SAMPLING, SUPERVISED, PAIRS = ("grpo", "sft"), ("sft",), ("dpo", "rm")


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """What a row is, and how a dataset reads it."""

    name: str
    algorithms: tuple[str, ...]
    """Algorithms that can train on such rows; the first is the default."""
    keys: Mapping[str, str | None] = field(default_factory=dict)
    """Keys of the dataset's section that differ from their defaults."""
    answer_key: str | None = None
    """Field with the expected answer; None if rows have none."""
    response_key: str | None = None
    """Field with a response to imitate, for supervised training; None if it is part of the conversation."""

    @property
    def is_text(self) -> bool:
        """Whether the prompt is a field with text, which a prompt config can contain."""
        return "record_fn" not in self.keys and self.keys.get("input_key") != "messages"


def recognize(rows: Sequence[Row], path: str) -> RowFormat:
    """The format that all rows have.

    Args:
        rows: The rows of a file; at least one.
        path: Name of the file in errors.

    Raises:
        DataError: The fields fit no format. The message lists them, and which config keys to set by hand.
    """
    for recognized in _FORMATS:
        if (found := recognized(rows)) is not None:
            return found
    fields = "\n".join(f"  {name}: {kind}" for name, kind in sorted(_kinds(rows).items()))
    raise DataError(
        f"{path}: the rows have no known format. Their fields:\n{fields}\n"
        "Known formats: a question with an answer or a response, `prompt`, `messages`, ShareGPT (`conversations`), Alpaca "
        "(`instruction`, `output`), and `chosen` with `rejected`. Name the fields yourself: --question FIELD and, if the rows "
        "have it, --answer FIELD (what a reward compares with) or --response FIELD (what the model should write); for "
        "preference pairs --question FIELD, --chosen FIELD and --rejected FIELD." + _proposal(rows, path)
    )


def _proposal(rows: Sequence[Row], path: str) -> str:
    """A command with the longest texts as questions and the field with the fewest values as answers; empty without texts."""
    texts = [name for name in rows[0] if _all_have(rows, name, str)]
    if not texts:
        return ""
    question = max(texts, key=lambda name: sum(len(row[name]) for row in rows))
    values = {name: len({row[name] for row in rows}) for name in texts if name != question}
    fields = ["--question", question, *(["--answer", min(values, key=values.__getitem__)] if values else [])]
    return f"\nFor example: {shlex.join(['rlcore', 'init', path, *fields])}"


def named_fields(
    rows: Sequence[Row],
    path: str,
    *,
    question: str | None,
    answer: str | None,
    response: str | None,
    chosen: str | None,
    rejected: str | None,
) -> RowFormat | None:
    """The format of rows whose fields the user names; None if no field is named.

    Raises:
        DataError: A row lacks one of the fields.
        ConfigError: These fields do not make up a format.
    """
    for name in filter(None, (question, answer, response, chosen, rejected)):
        missing = next((number for number, row in enumerate(rows, start=1) if row.get(name) is None), None)
        if missing is not None:
            raise DataError(f"{path}: row {missing} has no field {name!r}: it has {sorted(rows[missing - 1])}")
    if chosen or rejected:
        if not chosen or not rejected or answer or response:
            raise ConfigError("Preference pairs need --chosen and --rejected, without --answer and --response.")
        if (pairs := _pairs(rows, chosen=chosen, rejected=rejected, question=question)) is None:
            raise ConfigError(
                f"{path}: {chosen!r} and {rejected!r} must be texts, with the prompt in a field that --question names, or "
                "lists of messages."
            )
        return pairs
    if question is None and (answer or response):
        raise ConfigError("--answer and --response need --question: name the field with the question as well.")
    return None if question is None else _question_format(question, answer, response)


def _question_format(question: str, answer: str | None, response: str | None) -> RowFormat:
    keys: dict[str, str | None] = {} if question == "question" else {"input_key": question}
    if response is not None and answer is None:
        return RowFormat(
            name=f"a question ({question}) and a response ({response})",
            algorithms=SUPERVISED,
            keys={**keys, "response_key": response, "output_key": None},
            response_key=response,
        )
    if answer is None:
        return RowFormat(name=f"a prompt ({question})", algorithms=("grpo",), keys={**keys, "output_key": None})
    return RowFormat(
        name=f"a question ({question}) and an answer ({answer})",
        algorithms=SAMPLING,
        keys={**keys, **({} if answer == "expected_answer" else {"output_key": answer})},
        answer_key=answer,
        response_key=response or answer,
    )


def _pairs(
    rows: Sequence[Row], *, chosen: str = "chosen", rejected: str = "rejected", question: str | None = None
) -> RowFormat | None:
    if not _all_have(rows, chosen, str, list) or not _all_have(rows, rejected, str, list):
        return None
    prompt = question or next((name for name in _QUESTIONS if _all_have(rows, name, str, list)), None)
    if prompt is None and not _all_have(rows, chosen, list):
        return None  # without a prompt, both must be whole conversations
    keys = {"prompt_key": prompt or "prompt", "chosen_key": chosen, "rejected_key": rejected}
    return RowFormat(
        name="a prompt with a chosen and a rejected answer",
        algorithms=PAIRS,
        keys={key: name for key, name in keys.items() if key != f"{name}_key"},
    )


def _sharegpt(rows: Sequence[Row]) -> RowFormat | None:
    if not _all_have(rows, "conversations", list):
        return None
    return RowFormat(name="a ShareGPT conversation", algorithms=SUPERVISED, keys={"record_fn": "sharegpt"})


def _messages(rows: Sequence[Row]) -> RowFormat | None:
    if not all(isinstance(row.get("messages"), list) and row["messages"] for row in rows):
        return None
    if not all(isinstance(message, Mapping) and "role" in message for row in rows for message in row["messages"]):
        return None
    answer = _answer_field(rows)
    ends = all(row["messages"][-1]["role"] == "assistant" for row in rows)
    if answer is None and not ends:
        return RowFormat(
            name="a prompt of several messages", algorithms=("grpo",), keys={"input_key": "messages", "output_key": None}
        )
    expected = {} if answer == "expected_answer" else {"output_key": answer}
    algorithms = (*(("grpo",) if answer else ()), *(("sft",) if ends else ()))
    name = "a conversation" if answer is None else f"a conversation with an answer ({answer})"
    return RowFormat(name=name, algorithms=algorithms, keys={"input_key": "messages", **expected}, answer_key=answer)


def _alpaca(rows: Sequence[Row]) -> RowFormat | None:
    if not _all_have(rows, "instruction", str) or not _all_have(rows, "output", str):
        return None
    return RowFormat(name="an Alpaca instruction with its output", algorithms=SUPERVISED, keys={"record_fn": "alpaca"})


def _gsm8k(rows: Sequence[Row]) -> RowFormat | None:
    if not _all_have(rows, "question", str) or not all("####" in str(row.get("answer")) for row in rows):
        return None
    keys: dict[str, str | None] = {"record_fn": "gsm8k"}
    return RowFormat(name="a GSM8K problem (the number after ####)", algorithms=SAMPLING, keys=keys, answer_key="answer")


def _questions(rows: Sequence[Row]) -> RowFormat | None:
    question = next((name for name in _QUESTIONS if _all_have(rows, name, str, list)), None)
    if question is None:
        return None
    answer = _answer_field(rows)
    response = next((name for name in _RESPONSES if _all_have(rows, name, str, list)), None)
    return _question_format(question, answer, response)


_FORMATS: tuple[Callable[[Sequence[Row]], RowFormat | None], ...] = (
    _pairs,
    _sharegpt,
    _messages,
    _alpaca,
    _gsm8k,
    _questions,
)
"""In the order in which they are tried: a later format may accept the rows of an earlier one."""


def empty_answers(rows: Sequence[Row], form: RowFormat) -> list[int]:
    """The numbers of the rows, from 1, whose expected answer is empty."""
    key = form.answer_key
    return [] if key is None else [number for number, row in enumerate(rows, start=1) if not str(row[key]).strip()]


def has_system_messages(rows: Sequence[Row], form: RowFormat) -> bool:
    """Whether the messages of a row begin with a system message."""
    prompts = [row.get(form.keys.get("input_key") or "question") for row in rows]
    firsts = [prompt[0] for prompt in prompts if isinstance(prompt, list) and prompt]
    return any(isinstance(first, Mapping) and first.get("role") in ("system", "developer") for first in firsts)


def _answer_field(rows: Sequence[Row]) -> str | None:
    """The field with the expected answers: preferably without empty values, else empty in less than half of the rows."""
    named = [name for name in ANSWERS if all(isinstance(row.get(name), str | int | float) for row in rows)]
    empty = {name: sum(row[name] == "" for row in rows) for name in named}
    best = min(named, key=lambda name: empty[name] > 0, default=None)
    return best if best is not None and 2 * empty[best] < len(rows) else None


def _all_have(rows: Sequence[Row], name: str, *kinds: type) -> bool:
    return all(isinstance(row.get(name), kinds) and row[name] != "" for row in rows)


def _kinds(rows: Sequence[Row]) -> dict[str, str]:
    """The types of each field, and in how many rows it is missing."""
    kinds: dict[str, str] = {}
    for name in {key for row in rows for key in row}:
        types = sorted({type(row[name]).__name__ for row in rows if name in row})
        missing = sum(name not in row for row in rows)
        kinds[name] = " or ".join(types) + (f", missing in {missing} of {len(rows)} rows" if missing else "")
    return kinds
