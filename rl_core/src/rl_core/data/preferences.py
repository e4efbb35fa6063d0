"""Preferences: prompts with a better and a worse answer, read whole and checked; knows no tokenizer."""

from __future__ import annotations

from itertools import combinations
from typing import Any, TypedDict

from rl_core.data.dataset_config import PreferenceDatasetConfig
from rl_core.data.json_lines import JsonLines
from rl_core.errors import DataError

Messages = list[dict[str, Any]]


class PreferenceRecord(TypedDict):
    """One pair of answers.

    Attributes:
        prompt: The conversation that both answer: {role, content} each.
        chosen: The messages of the better answer.
        rejected: The messages of the worse one.
        task_name: What it belongs to.
    """

    prompt: Messages
    chosen: Messages
    rejected: Messages
    task_name: str


class PreferenceDataset(JsonLines[PreferenceRecord]):
    """The pairs of a file of JSON lines.

    A line is `{"prompt": ..., "chosen": ..., "rejected": ...}`, or `{"prompt": ..., "completions": [{"completion": ...,
    "rank": 0}, ...]}`; a prompt or answer is a text or a list of messages.

    Args:
        config: Which file, which fields.

    Raises:
        DataError: The file is absent or has no good row, or a row is bad; names file and line.
    """

    def __init__(self, config: PreferenceDatasetConfig) -> None:
        super().__init__(config.path, lambda row: pairs_from_row(row, config), on_bad_row=config.on_bad_row, called="pair")
        self.config = config


def pairs_from_row(row: dict[str, Any], config: PreferenceDatasetConfig) -> list[PreferenceRecord]:
    """The pairs that the config makes of one row's fields: one, or of ranked answers as many as `pairing` says.

    Raises:
        DataError: A field is absent or of the wrong kind, or there is nothing to prefer.
    """
    if config.chosen_key not in row and config.completions_key in row:
        return [_pair(row, better, worse, config) for better, worse in _ranked(row, config)]
    return [_pair(row, _field(row, config.chosen_key), _field(row, config.rejected_key), config)]


def _ranked(row: dict[str, Any], config: PreferenceDatasetConfig) -> list[tuple[Any, Any]]:
    """Pairs of answers of different ranks, the better one first."""
    listed = row[config.completions_key]
    if not isinstance(listed, list) or not all(
        isinstance(each, dict) and {"completion", "rank"} <= each.keys() for each in listed
    ):
        raise DataError(f"the field {config.completions_key!r} is {listed!r}: expected a list of {{completion, rank}}")
    ordered = sorted(listed, key=lambda each: each["rank"])
    pairs = [(a["completion"], b["completion"]) for a, b in combinations(ordered, 2) if a["rank"] < b["rank"]]
    if not pairs:
        raise DataError(f"the answers in {config.completions_key!r} have one rank: there is nothing to prefer")
    if config.pairing == "all":
        return pairs
    return [(ordered[0]["completion"], ordered[-1]["completion"])]


def _pair(row: dict[str, Any], better: Any, worse: Any, config: PreferenceDatasetConfig) -> PreferenceRecord:
    chosen = _messages(better, "assistant", f"the better answer {better!r}")
    rejected = _messages(worse, "assistant", f"the worse answer {worse!r}")
    if config.prompt_key in row:
        asked = row[config.prompt_key]
        prompt = _messages(asked, "user", f"the field {config.prompt_key!r}, {asked!r},")
        # Whole conversations are common as well: the prompt is then written three times.
        chosen, rejected = _without(prompt, chosen), _without(prompt, rejected)
    else:
        shared = _shared_length(chosen, rejected)
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if config.system_prompt is not None and (not prompt or prompt[0]["role"] != "system"):
        prompt = [{"role": "system", "content": config.system_prompt}, *prompt]
    _check(prompt, chosen, rejected, row, config)
    return PreferenceRecord(prompt=prompt, chosen=chosen, rejected=rejected, task_name=config.task_name or "default")


def _check(
    prompt: Messages, chosen: Messages, rejected: Messages, row: dict[str, Any], config: PreferenceDatasetConfig
) -> None:
    if chosen == rejected:
        raise DataError("both answers are the same: there is nothing to prefer")
    if not prompt:
        raise DataError(
            f"there is no prompt: the row has {sorted(row)} and no {config.prompt_key!r}, and its answers begin apart"
        )
    for name, answer in (("better", chosen), ("worse", rejected)):
        if not any(message["role"] == "assistant" for message in answer):
            raise DataError(f"the {name} answer has no message of the assistant: found {[m['role'] for m in answer]}")


def _messages(value: Any, role: str, what: str) -> Messages:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise DataError(f"{what} is neither a text nor a list of messages")
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise DataError(f"message {number} of {what} is no {{role, content}}: found {message!r}")
    return [dict(message) for message in value]


def _without(prompt: Messages, conversation: Messages) -> Messages:
    return conversation[len(prompt) :] if conversation[: len(prompt)] == prompt else conversation


def _shared_length(one: Messages, other: Messages) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _field(row: dict[str, Any], key: str) -> Any:
    if key not in row:
        raise DataError(f"the field {key!r} is absent: the row has {sorted(row)}")
    return row[key]
