"""Datasets of preferences: pairs, from rows with two answers or several ranked ones, and answers with a label."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any, NotRequired, TypedDict, TypeVar

from rl_core.errors import DataError, format_value
from rl_train.data.conversations import Messages, check_tool_use, kind_of, read_messages, tools_of, with_system_prompt
from rl_train.data.image_sources import image_parts
from rl_train.data.records import Records, RowReader
from rl_train.data.row_sections import PreferenceFields, UnpairedFields


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
    """One answer with a label.

    Attributes:
        prompt: The messages of the prompt: {role, content} each.
        completion: The messages of the answer.
        label: Whether the answer is desirable.
        task_name: Its task.
        tools: The tools available in it.
    """

    prompt: Messages
    completion: Messages
    label: bool
    task_name: str
    tools: NotRequired[list[dict[str, Any]]]


PreferenceT = TypeVar("PreferenceT", bound=PreferenceFields | UnpairedFields)


class _AnswerReader(RowReader[PreferenceT, Any]):
    """Creates the records of a row, by the keys of the config or by its function."""

    @abstractmethod
    def of_fields(self, row: dict[str, Any]) -> list[Any]:
        """The records of the fields of a row, or of what the function of the config returned."""

    def records(self, row: dict[str, Any]) -> list[Any]:
        """The row's records."""
        if self.function is None:
            return self._with_row_images(self.with_nested(row))
        made = self.made(row)
        if not isinstance(made, Mapping):
            raise DataError(f"{self.config.record_fn} returned {format_value(made)}: expected the fields of a {self.called}")
        return self._with_row_images(dict(made))

    def _with_row_images(self, row: dict[str, Any]) -> list[Any]:
        records = self.of_fields(row)
        for record in records:
            record["prompt"] = self.with_images(record["prompt"], row)
            if image_parts([message for part in ("chosen", "rejected", "completion") for message in record.get(part, ())]):
                raise DataError("an answer has an image, but only prompts can have images: remove it or the row")
        return records

    def kind(self, record: Any) -> frozenset[str]:
        """Features of a record that a chat template may not support: its roles and tool use."""
        messages = [message for part in ("prompt", "chosen", "rejected", "completion") for message in record.get(part, ())]
        return kind_of(messages, record.get("tools"))

    def prompt_of(self, row: dict[str, Any]) -> Any:
        """The prompt of the row's answers, without the system message that the config adds."""
        prompt = self.records(row)[0]["prompt"]
        return [message for message in prompt if message != {"role": "system", "content": self.config.system_prompt}]


class PairReader(_AnswerReader[PreferenceFields]):
    """Creates the pairs of a row, or with `split_pairs` the answers of these pairs with their labels."""

    called = "pair"

    def of_fields(self, row: dict[str, Any]) -> list[PreferenceRecord] | list[UnpairedRecord]:
        pairs = pairs_from_row(row, self.config)
        return [answer for pair in pairs for answer in _answers_of(pair)] if self.config.split_pairs else pairs


class UnpairedReader(_AnswerReader[UnpairedFields]):
    """Creates the labelled answer of a row."""

    called = "labelled answer"

    def of_fields(self, row: dict[str, Any]) -> list[UnpairedRecord]:
        return [unpaired_from_row(row, self.config)]


class PreferenceDataset(Records[PreferenceRecord | UnpairedRecord]):
    """The pairs of any source, or with `split_pairs` their answers.

    A row is `{"prompt": ..., "chosen": ..., "rejected": ...}`, or `{"prompt": ..., "completions": [{"completion": ...,
    "rank": 0}, ...]}`; a prompt or answer is a text or a list of messages.
    """

    reader = PairReader


class UnpairedDataset(Records[UnpairedRecord]):
    """The labelled answers of any source.

    A row is `{"prompt": ..., "completion": ..., "label": true}`; a prompt or answer is a text or a list of messages.
    """

    reader = UnpairedReader


def pairs_from_row(row: dict[str, Any], config: PreferenceFields) -> list[PreferenceRecord]:
    """The pairs of one row: one pair, or, for ranked answers, as many as `pairing` selects.

    Raises:
        DataError: A field is absent or of the wrong kind, or its answers are equally good.
    """
    if row.get(config.chosen_key) is None and row.get(config.completions_key) is not None:
        return [_pair(row, better, worse, config) for better, worse in _ranked(row, config)]
    if row.get(config.chosen_key) is None and {"completion", "label"} <= row.keys():
        raise DataError(
            f"the field {config.chosen_key!r} is missing: the row has {_present(row)}, so it is one answer with a label. Read "
            "such rows with `dataset_name: unpaired_preference`, and train on them with kto",
            key="dataset_name",
        )
    return [_pair(row, _field(row, config.chosen_key), _field(row, config.rejected_key), config)]


def unpaired_from_row(row: dict[str, Any], config: UnpairedFields) -> UnpairedRecord:
    """The labelled answer of one row.

    Raises:
        DataError: A field is absent or of the wrong kind.
    """
    if row.get(config.label_key) is None and {"chosen", "rejected"} <= row.keys():
        raise DataError(
            f"the field {config.label_key!r} is missing: the row has {_present(row)}, so it is a pair of answers. Read pairs "
            "with `dataset_name: preference` and `split_pairs: true`, or train on them with dpo",
            key="dataset_name",
        )
    label = _label(_field(row, config.label_key), config.label_key)
    given = _field(row, config.completion_key)
    completion = read_messages(given, f"the field {config.completion_key!r}, {format_value(given)},", role="assistant")
    prompt = _prompt(row, config)
    completion = _without(prompt, completion)
    prompt = with_system_prompt(prompt, config.system_prompt)
    if all(message["role"] in ("system", "developer") for message in prompt):
        raise DataError(f"there is no prompt: the field {config.prompt_key!r} has only {[m['role'] for m in prompt]}")
    _check_answers(completion=completion)
    record = UnpairedRecord(prompt=prompt, completion=completion, label=label, task_name=config.task_name or "default")
    if tools := _tools(row, config, prompt, completion):
        record["tools"] = tools
    return record


def _label(value: Any, key: str) -> bool:
    """A label as it is or as text, in any case."""
    read = {"true": True, "1": True, "false": False, "0": False}.get(value.strip().lower()) if isinstance(value, str) else value
    if not isinstance(read, bool | int | float) or read not in (0, 1):
        raise DataError(
            f"the field {key!r} is {format_value(value)}: expected true or 1 for a desirable answer, false or 0 for an "
            "undesirable one. If the field has another meaning, set another `label_key`"
        )
    return bool(read)


def _answers_of(pair: PreferenceRecord) -> Iterator[UnpairedRecord]:
    """Both answers of a pair: the chosen one is desirable, the rejected one is not."""
    for completion, label in ((pair["chosen"], True), (pair["rejected"], False)):
        record = UnpairedRecord(prompt=pair["prompt"], completion=completion, label=label, task_name=pair["task_name"])
        if "tools" in pair:
            record["tools"] = pair["tools"]
        yield record


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
    chosen = read_messages(better, f"the better answer {format_value(better)}", role="assistant")
    rejected = read_messages(worse, f"the worse answer {format_value(worse)}", role="assistant")
    if row.get(config.prompt_key) is not None:
        prompt = _prompt(row, config)
        # Answers may also be whole conversations, which repeat the prompt.
        chosen, rejected = _without(prompt, chosen), _without(prompt, rejected)
    else:
        shared = _shared_length(chosen, rejected)
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    prompt = with_system_prompt(prompt, config.system_prompt)
    _check(prompt, chosen, rejected, row, config)
    record = PreferenceRecord(prompt=prompt, chosen=chosen, rejected=rejected, task_name=config.task_name or "default")
    if tools := _tools(row, config, prompt, chosen, rejected):
        record["tools"] = tools
    if row.get(config.margin_key) is not None:
        record["margin"] = _margin(row[config.margin_key], config.margin_key)
    return record


def _prompt(row: dict[str, Any], config: PreferenceFields | UnpairedFields) -> Messages:
    asked = _field(row, config.prompt_key)
    return read_messages(asked, f"the field {config.prompt_key!r}, {format_value(asked)},", role="user")


def _tools(
    row: dict[str, Any], config: PreferenceFields | UnpairedFields, prompt: Messages, *answers: Messages
) -> list[dict[str, Any]]:
    """The tools of a row, whose use in each answer is checked."""
    tools = tools_of(row, config.tools_key, is_named=config.names_tools)
    for answer in answers:
        check_tool_use([*prompt, *answer], tools)
    return tools


def _margin(margin: Any, key: str) -> float:
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not (math.isfinite(margin) and margin >= 0):
        raise DataError(
            f"the field {key!r} is {margin!r}: expected the margin of the chosen answer, a number of at least 0. If the "
            "field has another meaning, set another `margin_key`"
        )
    return float(margin)


def _check(prompt: Messages, chosen: Messages, rejected: Messages, row: dict[str, Any], config: PreferenceFields) -> None:
    if chosen == rejected:
        raise DataError("both answers are the same, so there is no preference")
    if all(message["role"] in ("system", "developer") for message in prompt):
        raise DataError(
            f"there is no prompt: the row has {_present(row)} but no {config.prompt_key!r}, and its answers have no common "
            f"beginning"
        )
    _check_answers(better=chosen, worse=rejected)


def _check_answers(**answers: Messages) -> None:
    for name, answer in answers.items():
        if not any(message["role"] == "assistant" for message in answer):
            what = "the completion" if name == "completion" else f"the {name} answer"
            raise DataError(f"{what} has no assistant message: found {[m['role'] for m in answer]}")


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
