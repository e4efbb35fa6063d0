"""Turns records into rows, on access: chooses their task, tokenizes, truncates and masks."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rl_core.config.policy_sections import PolicyConfig
from rl_core.config.schema import GenerationConfig, TokenizerConfig
from rl_core.data.hub import published_file
from rl_core.data.images import RowImage
from rl_core.data.tokenizer import decode, load_tokenizer
from rl_core.errors import DataError
from rl_train.data.datasets import record_of
from rl_train.data.holdout import row_location
from rl_train.data.image_sources import texts_of
from rl_train.data.messages import (
    DatumSpec,
    MessageLog,
    PreferenceDatumSpec,
    add_loss_mask_to_message_log,
    get_formatted_message_log,
    prompt_log,
    trained_messages,
)
from rl_train.data.records import BadRow, BadRowError
from rl_train.data.row_sections import OnTooLong
from rl_train.data.special_tokens import control_texts, keeps_text
from rl_train.data.tasks import TaskChoice

_ALWAYS_TOKENIZED = 1_000_000
_CHARACTERS_PER_TOKEN = 100
"""A conversation with more characters than both `_ALWAYS_TOKENIZED` and this number for each allowed token is too long without
being tokenized, which takes a minute for 20 MB. English has about 4 characters per token."""
_LONGER = (
    "raise policy.max_total_sequence_length, and data.max_input_seq_length if it is set, or drop such rows "
    "(data.on_long_prompt: drop)"
)


def prompt_datum(
    record: Mapping[str, Any],
    *,
    idx: int,
    tokenizer: Any,
    max_length: int | None = None,
    on_too_long: OnTooLong = OnTooLong.DROP,
) -> DatumSpec:
    """A record as a prompt that ends with the generation prompt of the chat template.

    Args:
        record: A `datasets.Record`; `prefill` is the beginning of the answer, if the prompt ends with it.
        idx: Its index in the dataset.
        tokenizer: A Transformers tokenizer.
        max_length: Maximum number of tokens; None for no limit.
        on_too_long: How a longer one is handled.

    Raises:
        DataError: The prompt is too long and `on_too_long` says error, or the template cannot render it.
    """
    messages, is_cut = _tokenizable(record["messages"], idx, max_length, on_too_long)
    messages, images = _with_images(messages, tokenizer)
    log = prompt_log(messages, tokenizer, tools=record.get("tools"), prefill=record.get("prefill") or "", images=images)
    return _datum(log, record, idx, max_length, on_too_long, is_cut=is_cut)


def conversation_datum(
    record: Mapping[str, Any],
    *,
    idx: int,
    tokenizer: Any,
    max_length: int | None = None,
    on_too_long: OnTooLong = OnTooLong.DROP,
    roles_to_train_on: Sequence[str] = ("assistant",),
    only_unmask_final: bool = False,
) -> DatumSpec:
    """A record as a row for supervised training, with a `token_loss_mask` on every message.

    Args:
        record: A `datasets.Record` with at least one message to train on.
        idx: Its index in the dataset.
        tokenizer: A Transformers tokenizer.
        max_length: Maximum number of tokens; None for no limit.
        on_too_long: How a longer one is handled.
        roles_to_train_on: The roles that are trained.
        only_unmask_final: Train only the last message of these roles.

    Raises:
        DataError: As in `prompt_datum`, or no message has one of these roles.
    """
    roles = [message["role"] for message in record["messages"]]
    if not set(roles) & set(roles_to_train_on):
        raise DataError(
            f"record {idx} has messages of {roles}, none of {list(roles_to_train_on)}: nothing to train on. "
            "Set the field of the answer (`response_key`), or use whole conversations (`input_key: messages`)"
        )
    messages, is_cut = _tokenizable(record["messages"], idx, max_length, on_too_long)
    messages, images = _with_images(messages, tokenizer)
    trained = trained_messages(messages, roles_to_train_on, only_unmask_final)
    log = get_formatted_message_log(messages, tokenizer, tools=record.get("tools"), trained=trained, images=images)
    add_loss_mask_to_message_log([log], roles_to_train_on, only_unmask_final, tokenizer=tokenizer)
    check_trained(log, "the response")
    return _datum(log, record, idx, max_length, on_too_long, is_cut=is_cut)


def preference_datum(
    record: Mapping[str, Any],
    *,
    idx: int,
    tokenizer: Any,
    max_length: int | None = None,
    on_too_long: OnTooLong = OnTooLong.DROP,
) -> PreferenceDatumSpec:
    """A record's two conversations, with a `token_loss_mask` on every message: 1 for assistant tokens after the prompt.

    Args:
        record: A `preferences.PreferenceRecord`.
        idx: Its index in the dataset.
        tokenizer: A Transformers tokenizer.
        max_length: Maximum number of tokens of each conversation; None for no limit.
        on_too_long: How a pair with a longer conversation is handled.

    Raises:
        DataError: As in `prompt_datum`, or the record is not a pair.
    """
    missing = {"prompt", "chosen", "rejected"} - record.keys()
    if missing:
        raise DataError(
            f"record {idx} has {sorted(record)} but not {sorted(missing)}: use a dataset of preferences, such as "
            "`dataset_name: preference`"
        )
    limits: dict[str, Any] = {"idx": idx, "tokenizer": tokenizer, "max_length": max_length, "on_too_long": on_too_long}
    sides = ("chosen", "rejected")
    datums = [_answer_datum(record, side, side, may_be_empty=side == "rejected", **limits) for side in sides]
    return PreferenceDatumSpec(
        message_log_chosen=datums[0]["message_log"],
        message_log_rejected=datums[1]["message_log"],
        length_chosen=datums[0]["length"],
        length_rejected=datums[1]["length"],
        loss_multiplier=min(datum["loss_multiplier"] for datum in datums),
        idx=idx,
        task_name=record.get("task_name") or "default",
        margin=record.get("margin", 0.0),
    )


def unpaired_datum(record: Mapping[str, Any], **limits: Any) -> DatumSpec:
    """A record's conversation with its `label`, masked as in `preference_datum`, whose arguments and errors it has.

    `record` is a `preferences.UnpairedRecord`.
    """
    if missing := {"prompt", "completion", "label"} - record.keys():
        raise DataError(
            f"record {limits['idx']} has {sorted(record)} but not {sorted(missing)}: use a dataset of answers with a label, "
            "such as `dataset_name: preference` with `label_key`"
        )
    is_desirable = bool(record["label"])
    named = "desirable" if is_desirable else "undesirable"
    datum = _answer_datum(record, "completion", named, may_be_empty=not is_desirable, **limits)
    datum["label"] = is_desirable
    return datum


def check_processor_result(datum: Any, name: str, *, is_trained: bool) -> None:
    """Check that the result of a user's processor is a `DatumSpec` or `PreferenceDatumSpec`.

    Args:
        datum: The result.
        name: Name of the processor in errors.
        is_trained: Whether its messages need a `token_loss_mask`.

    Raises:
        DataError: It lacks a key, or a message has no tokens.
    """
    if not isinstance(datum, Mapping):
        raise DataError(f"{name} returned {datum!r}: expected a DatumSpec")
    logs = ["message_log"] if "message_log_chosen" not in datum else ["message_log_chosen", "message_log_rejected"]
    lengths = [log.replace("message_log", "length") for log in logs]
    if missing := sorted({*logs, *lengths, "loss_multiplier", "idx"} - datum.keys()):
        raise DataError(f"{name} returned {sorted(datum)} without {', '.join(missing)}: expected a DatumSpec")
    keys = ("token_ids", "token_loss_mask") if is_trained else ("token_ids",)
    for message in (message for log in logs for message in datum[log]):
        lacking = [key for key in keys if not isinstance(message.get(key), torch.Tensor)]
        if lacking:
            raise DataError(
                f"{name} returned a message of {message.get('role')!r} without {' and '.join(lacking)}, a tensor [t]"
            )
    for log in logs if is_trained and datum["loss_multiplier"] else ():
        check_trained(datum[log], f"the {log} that {name} returned", may_be_empty=True)


def _answer_datum(
    record: Mapping[str, Any],
    side: str,
    named: str,
    *,
    may_be_empty: bool,
    idx: int,
    tokenizer: Any,
    max_length: int | None = None,
    on_too_long: OnTooLong = OnTooLong.DROP,
) -> DatumSpec:
    """The prompt and one answer, `record[side]`, of which only the answer is trained."""
    messages, is_cut = _tokenizable([*record["prompt"], *record[side]], idx, max_length, on_too_long)
    messages, images = _with_images(messages, tokenizer)
    trained = [number for number in trained_messages(messages) if number >= len(record["prompt"])]
    log = get_formatted_message_log(messages, tokenizer, tools=record.get("tools"), trained=trained, images=images)
    add_loss_mask_to_message_log([log], tokenizer=tokenizer)
    for message in log[: len(record["prompt"])]:
        message["token_loss_mask"].zero_()
    check_trained(log, f"the {named} answer", may_be_empty=may_be_empty)
    return _datum(log, record, idx, max_length, on_too_long, is_cut=is_cut)


def check_trained(log: MessageLog, what: str, *, may_be_empty: bool = False) -> None:
    """Check that messages have tokens to train on, and not only the end of an empty answer.

    Args:
        log: Messages with `token_loss_mask`.
        what: Names them in errors.
        may_be_empty: Whether the end of an empty answer suffices: a model may learn to avoid it.

    Raises:
        DataError: Nothing is trained, or only the end.
    """
    trained = [message for message in log if bool(message["token_loss_mask"].any())]
    if not trained:
        raise DataError(
            f"{what} has no token to train on: its text is empty, has the weight 0, or is dropped by the chat template"
        )
    if not may_be_empty and not any(map(_has_content, trained)):
        raise DataError(f"{what} is empty, so that only its end would be trained, and the model would learn to end at once")


def _has_content(message: Mapping[str, Any]) -> bool:
    """Whether a message has text or calls; without content, its tokens are those of the user's processor."""
    texts = [value for key, value in message.items() if isinstance(value, str) and key not in ("role", "tool_call_id")]
    return bool(message.get("tool_calls")) or any(text.strip() for text in texts) or "content" not in message


def _tokenizable(
    messages: Sequence[Mapping[str, Any]], idx: int, max_length: int | None, on_too_long: OnTooLong
) -> tuple[Sequence[Mapping[str, Any]], bool]:
    """The messages, and whether their texts are cut because they are too long to be tokenized, so that the row is dropped.

    Raises:
        DataError: They are too long, and `on_too_long` says error.
    """
    characters = sum(len(text) for message in messages for text in texts_of(message))
    if max_length is None or characters <= max(_ALWAYS_TOKENIZED, _CHARACTERS_PER_TOKEN * max_length):
        return messages, False
    if on_too_long is OnTooLong.ERROR:
        raise DataError(
            f"record {idx} has {characters} characters, too many for the {max_length} tokens that are allowed: {_LONGER}"
        )
    return [{**message, "content": "".join(texts_of(message))[:max_length]} for message in messages], True


def _with_images(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any
) -> tuple[Sequence[Mapping[str, Any]], Sequence[RowImage]]:
    """The messages with references to their images, and these images, which are read now."""
    if not any(isinstance(message.get("content"), list) for message in messages):
        return messages, ()
    from rl_train.data.images import read_images

    return read_images(messages, tokenizer)


def _datum(
    log: MessageLog, record: Mapping[str, Any], idx: int, max_length: int | None, on_too_long: OnTooLong, *, is_cut: bool
) -> DatumSpec:
    length = sum(len(message["token_ids"]) for message in log)
    too_long = is_cut or (max_length is not None and length > max_length)
    if max_length is not None and too_long:
        if on_too_long is OnTooLong.ERROR:
            raise DataError(f"record {idx} has {length} tokens, but {max_length} are allowed: {_LONGER}")
        _truncate(log, max_length)
        length = sum(len(message["token_ids"]) for message in log)
    datum = DatumSpec(
        message_log=log,
        length=length,
        extra_env_info=record.get("extra_env_info"),
        loss_multiplier=0.0 if too_long else 1.0,
        idx=idx,
        task_name=record.get("task_name", "default"),
        stop_strings=record.get("stop_strings"),
    )
    if record.get("tools"):
        datum["tools"] = record["tools"]
    if record.get("prefill"):
        datum["prefill"] = record["prefill"]
    return datum


def _truncate(log: MessageLog, max_length: int) -> None:
    """Keep the first `max_length` tokens, in place: the row is not trained on, but must fit into batches.

    An image that does not fit is left out, with everything after it.
    """
    left = max_length
    for message in log:
        if images := message.get("images"):
            message["images"] = [image for image in images if image.end <= left]
            if len(message["images"]) < len(images):
                left = min(left, images[len(message["images"])].start)
                max_length = 0  # of the messages that follow
        for key, value in message.items():
            if isinstance(value, torch.Tensor):
                message[key] = value[:left]
        left = min(left - len(message["token_ids"]), max_length)


_FIELDS = ("messages", "prompt", "chosen", "rejected", "completion", "prefill", "tools")
_TOKENS_KEPT = 1 << 22
"""Most tokens of rows that are kept, so that a row that is checked before a run is tokenized once."""
_BYTES_PER_TOKEN = 12
_TOKENS_OF_A_ROW = 280
"""The memory of a row apart from its tokens (3.3 KB were measured), in tokens."""
_log = logging.getLogger("rlcore")


class TokenizedRows(Sequence[Any]):
    """A dataset whose records are tokenized on access. Recent rows are kept, so they must not be changed.

    Args:
        records: map-style dataset of records.
        process: turns a record into a row; a partial with `tokenizer`, or without it to give no warnings.
        tasks: the task of each record.
        name: name of the dataset in errors.
    """

    def __init__(self, records: Any, process: Callable[..., Any], *, tasks: TaskChoice, name: str = "dataset") -> None:
        self.records = records
        self._tokenizer, self._warned_of = getattr(process, "keywords", {}).get("tokenizer"), set[int]()
        self._process, self._is_end_checked = process, False
        self._tasks = tasks
        self._name = name
        self._kept, self._tokens_kept = dict[int, Any](), 0

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: Any) -> Any:
        if (row := self._kept.get(int(index))) is None:
            row = self._kept[int(index)] = self._tokenized(index)
            self._tokens_kept += _tokens_of(row)
            while self._tokens_kept > _TOKENS_KEPT:
                self._tokens_kept -= _tokens_of(self._kept.pop(next(iter(self._kept))))
        return row

    def record(self, index: Any) -> dict[str, Any]:
        """A record with its task, not tokenized."""
        record = dict(record_of(self.records, index, name=self._name))
        task = self._tasks.of_record(record.get("task_name"))
        return record if task is None else {**record, "task_name": task}

    def _tokenized(self, index: Any) -> Any:
        try:
            record = self.record(index)
            datum = self._process(record, idx=int(index))
            if datum.get("task_name") is None and record.get("task_name") is not None:  # left out by the processor of a user
                datum = {**datum, "task_name": record["task_name"]}
            self._tasks.check(datum.get("task_name"))
            self._warn_of_control_tokens(record, int(index))
            self._warn_of_a_missing_end(datum)
        except DataError as error:
            raise BadRowError(BadRow.of(self.row_location(index), error)) from error
        return datum

    def row_location(self, index: int) -> str:
        """Name of the dataset and location of the row of a record."""
        return f"{self._name}: {row_location(self.records, index)}"

    def _warn_of_control_tokens(self, record: Mapping[str, Any], index: int) -> None:
        """Name a row whose text has control tokens: each of the first five, then every hundredth."""
        tokenizer, fields = self._tokenizer, [record.get(name) for name in _FIELDS]
        if tokenizer is None or index in self._warned_of or not (names := control_texts(tokenizer, *fields)):
            return
        self._warned_of.add(index)
        if vars(tokenizer).get("parse_control_tokens") or ((count := len(self._warned_of)) > 5 and count % 100):
            return
        kept = "is tokenized as text, not as a control token (policy.tokenizer.parse_control_tokens: true changes this)"
        parsed = f"becomes a control token, because {type(tokenizer).__name__} cannot tokenize it as text. Remove it"
        become = kept if keeps_text(tokenizer) else parsed
        where, texts = self.row_location(index), ", ".join(names)
        _log.warning("%s has the text %s, which %s. Rows with such text so far: %d", where, texts, become, count)

    def _warn_of_a_missing_end(self, datum: Mapping[str, Any]) -> None:
        """Warn if the first trained answer of supervised training ends with its content."""
        last = (datum.get("message_log") or [{}])[-1]
        mask, content = last.get("token_loss_mask"), last.get("content")
        if self._tokenizer is None or self._is_end_checked or mask is None or not mask.any() or not datum["loss_multiplier"]:
            return
        self._is_end_checked = True
        trained = decode(self._tokenizer, last["token_ids"][mask > 0].tolist()).rstrip()
        if isinstance(content, str) and content.strip() and not last.get("tool_calls") and trained.endswith(content.rstrip()):
            _log.warning(
                "%s: nothing follows the text of answers, so training does not teach the model to end them. Use a chat "
                "template that writes an end token after each answer (policy.tokenizer.chat_template)",
                self._name,
            )


def _tokens_of(row: Mapping[str, Any]) -> int:
    logs = (row.get(key, ()) for key in ("message_log", "message_log_chosen", "message_log_rejected"))
    images = [image for log in logs for message in log for image in message.get("images") or ()]
    held: int = sum(tensor.nbytes for image in images for tensor in image.inputs.values()) // _BYTES_PER_TOKEN
    return _TOKENS_OF_A_ROW + held + sum(int(row.get(key, 0)) for key in ("length", "length_chosen", "length_rejected"))


def load_policy_tokenizer(policy: PolicyConfig) -> Any:
    """The tokenizer of a policy's section, with its chat template and template variables.

    Raises:
        DataError: As `load_tokenizer`.
    """
    section, name = policy.tokenizer, policy.tokenizer.name or policy.model_name
    tokenizer = load_tokenizer(
        name,
        model_name=policy.model_name,
        chat_template=section.chat_template or template_of_processor(name),
        chat_template_kwargs=section.chat_template_kwargs,
    )
    # For checkpoints: where its files are, and whether they have its template.
    tokenizer.published = name, section.chat_template is None and not section.chat_template_kwargs
    return with_text_settings(tokenizer, policy)


def engine_tokenizer(section: GenerationConfig) -> TokenizerConfig | None:
    """`tokenizer` of the section of an engine, or of its section `<backend>_cfg`; None if neither is set."""
    sections = (section, *(getattr(section, key) for key in type(section).model_fields if key.endswith("_cfg")))
    return next((own for each in sections if (own := getattr(each, "tokenizer", None)) is not None), None)


def template_of_processor(name: str) -> str | None:
    """The chat template of a model's processor, if it has one apart from that of the tokenizer."""
    file = published_file(name, "chat_template.json")
    return None if file is None else json.loads(file.read_text(encoding="utf-8")).get("chat_template")


def with_text_settings(tokenizer: Any, policy: PolicyConfig) -> Any:
    """The tokenizer with the attributes that `rl_train.data.special_tokens` reads; they are never saved."""
    tokenizer.model_name = policy.model_name
    tokenizer.visible_special_tokens = policy.tokenizer.visible_special_tokens
    tokenizer.parse_control_tokens = policy.tokenizer.parse_control_tokens
    return tokenizer
