"""Datasets of preferences: pairs, from rows with two answers or several ranked ones, and answers with a label."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NotRequired, TypedDict

from rl_core.errors import DataError, format_value
from rl_train.data.conversations import Messages, check_tool_use, kind_of, read_messages, tools_of, with_system_prompt
from rl_train.data.image_sources import image_parts
from rl_train.data.records import Records, RowReader
from rl_train.data.row_sections import PreferenceFields


class PreferenceRecord(TypedDict):
    """One pair of answers.

    Attributes:
        prompt: The messages of the prompt: {role, content} each.
        chosen: The messages of the chosen answer.
        rejected: The messages of the rejected answer.
        task_name: Its task.
        tools: The tools available in both.
        margin: By how much the chosen answer's score should be higher, if the row has it.
    """

    prompt: Messages
    chosen: Messages
    rejected: Messages
    task_name: str
    tools: NotRequired[list[dict[str, Any]]]
    margin: NotRequired[float]


class UnpairedRecord(TypedDict):
    """One answer, `completion`, with a label, which says whether it is desirable; the rest as in a pair."""

    prompt: Messages
    completion: Messages
    label: bool
    task_name: str
    tools: NotRequired[list[dict[str, Any]]]


class PreferenceReader(RowReader[PreferenceFields, PreferenceRecord | UnpairedRecord]):
    """Creates the pairs or the labelled answers of a row, by the keys of the config or by its function."""

    called = "preference"

    def records(self, row: dict[str, Any]) -> Sequence[PreferenceRecord | UnpairedRecord]:
        """The row's pairs, or its answers with a label."""
        fields = self.with_nested(row) if self.function is None else self.made(row)
        if not isinstance(fields, Mapping):
            raise DataError(f"{self.config.record_fn} returned {format_value(fields)}: expected the fields of a preference")
        fields = dict(fields)
        if self.config.label_key is not None:
            return [self._with_images(labelled_from_row(fields, self.config, self.config.label_key), fields)]
        pairs = [self._with_images(pair, fields) for pair in pairs_from_row(fields, self.config)]
        return [answer for pair in pairs for answer in _answers_of(pair)] if self.config.split_pairs else pairs

    def _with_images(self, record: Any, row: Mapping[str, Any]) -> Any:
        record["prompt"] = self.with_images(record["prompt"], row)
        if image_parts([message for part in ("chosen", "rejected", "completion") for message in record.get(part, ())]):
            raise DataError("an answer has an image, but only prompts can have images: remove it or the row")
        return record

    def kind(self, record: Mapping[str, Any]) -> frozenset[str]:
        """Features of a record that a chat template may not support: its roles and tool use."""
        messages = [message for part in ("prompt", "chosen", "rejected", "completion") for message in record.get(part, ())]
        return kind_of(messages, record.get("tools"))

    def prompt_of(self, row: dict[str, Any]) -> Any:
        """The prompt of the answers, without the system message that the config adds."""
        prompt = self.records(row)[0]["prompt"]
        return [message for message in prompt if message != {"role": "system", "content": self.config.system_prompt}]


class PreferenceDataset(Records[PreferenceRecord | UnpairedRecord]):
    """The pairs of any source, or its answers with a label.

    A row is `{"prompt": ..., "chosen": ..., "rejected": ...}`, or `{"prompt": ..., "completions": [{"completion": ...,
    "rank": 0}, ...]}`, or with `label_key` `{"prompt": ..., "completion": ..., "label": true}`; a prompt or answer is a text
    or a list of messages.
    """

    reader = PreferenceReader


def pairs_from_row(row: dict[str, Any], config: PreferenceFields) -> list[PreferenceRecord]:
    """The pairs of one row: one pair, or, for ranked answers, as many as `pairing` selects.

    Raises:
        DataError: A field is absent or of the wrong kind, or its answers are equally good.
    """
    if row.get(config.chosen_key) is None and row.get(config.completions_key) is not None:
        return [_pair(row, better, worse, config) for better, worse in _ranked(row, config)]
    if row.get(config.chosen_key) is None and {"completion", "label"} <= row.keys():
        raise DataError(
            f"the field {config.chosen_key!r} is missing: the row has {_present(row)}, so it is one answer with a label. Set "
            "`label_key: label`, and train on such rows with kto",
            key="chosen_key",
        )
    return [_pair(row, _field(row, config.chosen_key), _field(row, config.rejected_key), config)]


def labelled_from_row(row: dict[str, Any], config: PreferenceFields, label_key: str) -> UnpairedRecord:
    """The labelled answer of one row.

    Raises:
        DataError: A field is absent or of the wrong kind.
    """
    if row.get(label_key) is None and {"chosen", "rejected"} <= row.keys():
        raise DataError(
            f"the field {label_key!r} is missing: the row has {_present(row)}, so it is a pair of answers. Remove `label_key`, "
            "and set `split_pairs: true` or train with dpo",
            key="label_key",
        )
    label = _label(_field(row, label_key), label_key)
    prompt, [completion], tools = _conversations(row, config, labelled=_field(row, config.completion_key))
    record = UnpairedRecord(prompt=prompt, completion=completion, label=label, task_name=config.task_name or "default")
    if tools:
        record["tools"] = tools
    return record


def _label(value: Any, key: str) -> bool:
    read = {"true": 1, "1": 1, "false": 0, "0": 0}.get(value.strip().lower()) if isinstance(value, str) else value
    if not isinstance(read, int | float) or read not in (0, 1):
        raise DataError(
            f"the field {key!r} is {format_value(value)}: expected true or 1 for a desirable answer, false or 0 for an "
            "undesirable one"
        )
    return bool(read)


def _answers_of(pair: PreferenceRecord) -> list[UnpairedRecord]:
    """Both answers of a pair: the chosen one is desirable, the rejected one is not."""
    sides = ((pair["chosen"], True), (pair["rejected"], False))
    answers = [
        UnpairedRecord(prompt=pair["prompt"], completion=of, label=good, task_name=pair["task_name"]) for of, good in sides
    ]
    for answer in answers if "tools" in pair else ():
        answer["tools"] = pair["tools"]
    return answers


def _ranked(row: dict[str, Any], config: PreferenceFields) -> list[tuple[Any, Any]]:
    """Pairs of answers that differ in rank or score, the better one first, in the order of the best."""
    key = config.completions_key
    if not isinstance(row[key], list):
        raise DataError(
            f"the field {key!r} is {format_value(row[key])}: expected a list of {{completion, rank}} or {{completion, score}}"
        )
    listed = [(_worth(each, number, key), each["completion"]) for number, each in enumerate(row[key])]
    if len({by for (by, _), _ in listed}) > 1:
        raise DataError(f"some answers in {key!r} have a rank and others a score: use one of the two for all")
    # sorted() is stable, so the first of several equally good answers is used.
    ordered = sorted(listed, key=lambda each: each[0][1], reverse=True)
    pairs = [(better, worse) for ((_, a), better), ((_, b), worse) in combinations(ordered, 2) if a > b]
    if not pairs:
        what = "score" if listed and listed[0][0][0] == "score" else "rank"
        raise DataError(f"the answers in {key!r} all have the same {what}, so there is no preference")
    return pairs if config.pairing == "all" else [(ordered[0][1], ordered[-1][1])]


def _worth(answer: Any, number: int, key: str) -> tuple[str, float]:
    """`rank` or `score`, and the value of the answer: higher is better."""
    given = {name: value for name, value in answer.items() if value is not None} if isinstance(answer, Mapping) else {}
    named = [name for name in ("rank", "score") if name in given]
    if "completion" not in given or len(named) != 1:
        raise DataError(
            f"answer {number} of the field {key!r} is {format_value(answer)}: expected a list of {{completion, rank}} or "
            "{completion, score}"
        )
    value = given[named[0]]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"answer {number} of the field {key!r} has the {named[0]} {value!r}: expected a number")
    return named[0], -value if named[0] == "rank" else value


def _pair(row: dict[str, Any], better: Any, worse: Any, config: PreferenceFields) -> PreferenceRecord:
    prompt, [chosen, rejected], tools = _conversations(row, config, better=better, worse=worse)
    record = PreferenceRecord(prompt=prompt, chosen=chosen, rejected=rejected, task_name=config.task_name or "default")
    if tools:
        record["tools"] = tools
    if row.get(config.margin_key) is not None:
        record["margin"] = _margin(row[config.margin_key], config.margin_key)
    return record


def _conversations(
    row: dict[str, Any], config: PreferenceFields, **given: Any
) -> tuple[Messages, list[Messages], list[dict[str, Any]]]:
    """The prompt, the answers to it, which are `given` by their names in errors, and the tools."""
    answers = [read_messages(each, f"the {name} answer {format_value(each)}", role="assistant") for name, each in given.items()]
    first, *others = answers
    if row.get(config.prompt_key) is not None:
        asked = row[config.prompt_key]
        prompt = read_messages(asked, f"the field {config.prompt_key!r}, {format_value(asked)},", role="user")
        # Answers may also be whole conversations, which repeat the prompt.
        answers = [_without(prompt, answer) for answer in answers]
    else:
        shared = min((_shared_length(first, other) for other in others), default=0)
        prompt, answers = first[:shared], [answer[shared:] for answer in answers]
    prompt = with_system_prompt(prompt, config.system_prompt)
    if answers[0] in answers[1:]:
        raise DataError("both answers are the same, so there is no preference")
    if all(message["role"] in ("system", "developer") for message in prompt):
        raise DataError(
            f"there is no prompt: the row has {_present(row)} but no {config.prompt_key!r}, and its answers have no common "
            f"beginning"
        )
    tools = tools_of(row, config.tools_key, is_named=config.names_tools)
    for name, answer in zip(given, answers, strict=True):
        if not any(message["role"] == "assistant" for message in answer):
            raise DataError(f"the {name} answer has no assistant message: found {[m['role'] for m in answer]}")
        check_tool_use([*prompt, *answer], tools)
    return prompt, answers, tools


def _margin(margin: Any, key: str) -> float:
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not (math.isfinite(margin) and margin >= 0):
        raise DataError(
            f"the field {key!r} is {margin!r}: expected the margin of the chosen answer, a number of at least 0. If the "
            "field has another meaning, set another `margin_key`"
        )
    return float(margin)


def _without(prompt: Messages, conversation: Messages) -> Messages:
    return conversation[len(prompt) :] if conversation[: len(prompt)] == prompt else conversation


def _shared_length(one: Messages, other: Messages) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _field(row: dict[str, Any], key: str) -> Any:
    if row.get(key) is None:
        raise DataError(f"the field {key!r} is missing: the row has {_present(row)}")
    return row[key]


def _present(row: Mapping[str, Any]) -> list[str]:
    return sorted(key for key, value in row.items() if value is not None)
