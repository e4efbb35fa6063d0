"""Conversations as tokens: message logs, their loss masks and flat batches; knows a tokenizer's face, no model.

A message log is a list of {role, content, token_ids, ...}. Concatenating `token_ids` gives *the* training sequence, so that
it must be what the chat template makes of the whole conversation, token for token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.padding import cat_right_padded
from rl_core.data.rendering import ToolForm, check_names, form_for, render, with_calls_read
from rl_core.data.schema import pad_value
from rl_core.errors import DataError

Message = dict[str, Any]
MessageLog = list[Message]


class DatumSpec(TypedDict):
    """One prompt (or conversation), tokenised.

    Attributes:
        message_log: Messages with `token_ids` [t] int64.
        length: Tokens in all.
        extra_env_info: What the environment knows of the row; None for a plain conversation.
        loss_multiplier: 0.0 drops the row from training, else 1.0.
        idx: The row's place in its dataset.
        task_name: Which environment answers and scores.
        stop_strings: Texts that end a completion, or None.
    """

    message_log: MessageLog
    length: int
    extra_env_info: dict[str, Any] | None
    loss_multiplier: float
    idx: int
    task_name: NotRequired[str]
    stop_strings: NotRequired[list[str] | None]


class PreferenceDatumSpec(TypedDict):
    """One prompt with a preferred and a rejected answer, both tokenised with the prompt; fields as in `DatumSpec`.

    `margin` is by how much the preferred answer's score should lead, 0.0 where it is not there.
    """

    message_log_chosen: MessageLog
    message_log_rejected: MessageLog
    length_chosen: int
    length_rejected: int
    loss_multiplier: float
    idx: int
    task_name: NotRequired[str]
    margin: NotRequired[float]


def get_formatted_message_log(
    message_log: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    add_generation_prompt: bool = False,
    tools: list[dict[str, Any]] | None = None,
    add_bos_token: bool = True,
    add_eos_token: bool = True,
) -> MessageLog:
    """The messages with `token_ids` [t] int64 added; concatenated, they are the whole conversation's tokens.

    With a chat template: the concatenation equals the template applied to all messages. The header that opens an assistant
    turn belongs to the message before it, so that a mask on assistant messages trains what a model would sample and no more.
    A beginning without an answer that the template does not render on its own (some refuse a system message alone) yields its
    tokens to the next message and keeps none; so does the result of a tool to a result after it. What tools are offered and
    called is in the tokens, or it is an error: see `rendering`.

    Without a chat template: each content is tokenised by itself, without special tokens, and nothing is put between messages.
    The tokenizer's BOS token, if it has one, opens the first message; its EOS token closes every assistant message.

    Args:
        message_log: Messages of `role` and `content`, with `tool_calls` in OpenAI's form where tools are called.
        tokenizer: A Transformers tokenizer.
        add_generation_prompt: Whether the last message is followed by the header of an assistant turn (template only).
        tools: Functions that are offered, for the template.
        add_bos_token: Whether BOS opens the conversation (without a template; a template says so itself).
        add_eos_token: Whether EOS closes assistant messages (likewise).

    Raises:
        DataError: The template cannot render the conversation, leaves out what tools are in it, or rewrites earlier messages
            once later ones are there.
    """
    if not getattr(tokenizer, "chat_template", None):
        if tools or any(message.get("tool_calls") for message in message_log):
            raise DataError(
                "the conversation has tools, and without a chat template there is nothing that could say them: give one "
                "(policy.tokenizer.chat_template)"
            )
        pieces = _plain_pieces(message_log, tokenizer, add_bos=add_bos_token, add_eos=add_eos_token)
    else:
        pieces = _template_pieces(message_log, tokenizer, add_generation_prompt=add_generation_prompt, tools=tools)
    return [
        {**message, "token_ids": torch.tensor(piece, dtype=torch.int64)}
        for message, piece in zip(message_log, pieces, strict=True)
    ]


def add_loss_mask_to_message_log(
    message_logs: Iterable[MessageLog],
    roles_to_train_on: Sequence[str] = ("assistant",),
    only_unmask_final: bool = False,
    *,
    tokenizer: Any = None,
) -> None:
    """Give every message a `token_loss_mask` [t] float32, in place: 1 on the tokens of a message that is trained, else 0.

    A message with `weight: 0` is not trained, whatever its role. With a tokenizer, neither is white space after the special
    token that closes a turn (the line break after `<|im_end|>`): a model stops there, so that it is never sampled.

    Args:
        message_logs: Message logs with `token_ids`.
        roles_to_train_on: The roles that are trained.
        only_unmask_final: Train only the last message of these roles.
        tokenizer: Knows the special tokens; None trains all tokens of a message.

    Raises:
        DataError: A message has no `token_ids`.
    """
    for log in message_logs:
        trained = [number for number, message in enumerate(log) if message["role"] in roles_to_train_on]
        trained = trained[-1:] if only_unmask_final else trained
        for number, message in enumerate(log):
            is_trained = number in trained and message.get("weight") != 0
            tokens = _tokenized(message)
            mask = torch.full_like(tokens, float(is_trained), dtype=torch.float32)
            if is_trained and tokenizer is not None:
                mask[len(mask) - _never_sampled(tokens.tolist(), tokenizer) :] = 0.0
            message["token_loss_mask"] = mask


def message_log_to_flat_messages(message_log: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The log's fields, one entry each: per-token tensors concatenated to [T], others as lists over messages.

    A per-token field that some messages lack is filled there with its padding value (0.0 log-probs on a prompt); another
    field with None.

    Raises:
        DataError: A message has no `token_ids`, or a per-token tensor whose length differs from theirs.
    """
    return _flat(message_log, _tensor_fields([message_log]))


def batched_message_log_to_flat_message(
    message_logs: Sequence[Sequence[Mapping[str, Any]]],
    pad_value_dict: Mapping[str, int | float | bool] | None = None,
    make_sequence_length_divisible_by: int = 1,
) -> tuple[BatchedDataDict[Any], torch.Tensor]:
    """The logs as one right-padded batch, and the rows' lengths.

    Args:
        message_logs: B message logs.
        pad_value_dict: What pads a field; otherwise `schema.pad_value`. Give `token_ids` the tokenizer's padding id.
        make_sequence_length_divisible_by: T is rounded up to a multiple of this.

    Returns:
        The batch (per-token fields [B, T], others lists of lists), and the lengths [B] int64 in tokens.
    """
    fields = _tensor_fields(message_logs)
    rows = [_flat(log, fields) for log in message_logs]
    lengths = torch.tensor([len(row["token_ids"]) for row in rows], dtype=torch.int64)
    multiple = make_sequence_length_divisible_by
    width = -(-int(lengths.max() if len(lengths) else 0) // multiple) * multiple
    pads = pad_value_dict or {}
    batch: BatchedDataDict[Any] = BatchedDataDict()
    for key in dict.fromkeys(key for row in rows for key in row):
        if key not in fields:
            batch[key] = [row.get(key) for row in rows]
            continue
        padding = pads.get(key, pad_value(key))
        filler = torch.full((1, width), padding, dtype=fields[key])
        batch[key] = cat_right_padded([filler, *(row[key].unsqueeze(0) for row in rows)], pad_value=padding)[1:]
    return batch, lengths


def get_first_index_that_differs(first: Sequence[Any], second: Sequence[Any]) -> int:
    """The first place where two sequences (or texts) differ; the shorter length if one begins the other."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _encode(tokenizer: Any, text: str) -> list[int]:
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens


def _plain_pieces(message_log: Sequence[Mapping[str, Any]], tokenizer: Any, *, add_bos: bool, add_eos: bool) -> list[list[int]]:
    pieces = [_encode(tokenizer, message["content"]) for message in message_log]
    if pieces and add_bos and tokenizer.bos_token_id is not None:
        pieces[0].insert(0, tokenizer.bos_token_id)
    for message, piece in zip(message_log, pieces, strict=True):
        if message["role"] == "assistant" and add_eos and tokenizer.eos_token_id is not None:
            piece.append(tokenizer.eos_token_id)
    return pieces


def _template_pieces(
    message_log: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    add_generation_prompt: bool,
    tools: list[dict[str, Any]] | None,
) -> list[list[int]]:
    message_log = with_calls_read(message_log)
    form = form_for(message_log, tokenizer, tools=tools)
    pieces, texts = list[list[int]](), list[str]()
    text, tokens = "", list[int]()
    for end in range(1, len(message_log) + 1):
        is_last = end == len(message_log)
        header = add_generation_prompt if is_last else message_log[end]["role"] == "assistant"
        header = header and (is_last or message_log[end - 1]["role"] != "assistant")
        longer = None if _is_inside(message_log, end) else _rendered(message_log, end, tokenizer, form, header, tools)
        if longer is None:
            pieces.append([])
            texts.append("")
            continue
        longer_tokens = _encode(tokenizer, longer)
        if longer_tokens[: len(tokens)] != tokens:
            raise _merging(end, text, longer) if longer.startswith(text) else _unstable(end, text, longer)
        pieces.append(longer_tokens[len(tokens) :])
        texts.append(longer[len(text) :])
        text, tokens = longer, longer_tokens
    check_names(message_log, texts, tools=tools)
    return pieces


def _is_inside(message_log: Sequence[Mapping[str, Any]], end: int) -> bool:
    """Whether the place is between two results: templates write neighbouring ones as one turn, which ends after the last."""
    return end < len(message_log) and message_log[end - 1]["role"] == message_log[end]["role"] == "tool"


def _rendered(
    message_log: Sequence[Mapping[str, Any]], end: int, tokenizer: Any, form: ToolForm, header: bool, tools: Any
) -> str | None:
    """The first `end` messages as text; None where the template does not render such a beginning on its own."""
    try:
        return render(message_log[:end], tokenizer, form=form, add_generation_prompt=header, tools=tools)
    except DataError:
        # An answer must have tokens of its own, and no others: they are what is trained.
        if end == len(message_log) or "assistant" in (message_log[end - 1]["role"], message_log[end]["role"]):
            raise
        return None


def _unstable(end: int, shorter: str, longer: str) -> DataError:
    place = get_first_index_that_differs(shorter, longer)
    return DataError(
        f"the chat template is not prefix-stable: with message {end - 1} (from 0) added, the tokens before it change from "
        f"character {place} on (before: {shorter[place : place + 60]!r}, now: {longer[place : place + 60]!r}). Training on "
        "such a conversation would train on what the model never saw: use a template that keeps earlier messages as they "
        "were (for instance one that does not drop earlier reasoning), or one conversation a turn"
    )


def _merging(end: int, shorter: str, longer: str) -> DataError:
    return DataError(
        f"message {end - 1} (from 0), which begins with {longer[len(shorter) :][:20]!r}, and what stands before it, "
        f"{shorter[-20:]!r}, are other tokens together than apart: a model that answers there would sample other tokens than "
        "these. Strip the white space at the message's beginning; where there is none, take a template whose header of a turn "
        "this tokenizer keeps whole"
    )


def _never_sampled(tokens: Sequence[int], tokenizer: Any) -> int:
    """How many tokens at the end are white space after a special token."""
    special = set(getattr(tokenizer, "all_special_ids", ()))
    after = next((count for count, token in enumerate(reversed(tokens)) if token in special), 0)
    return after if after and not tokenizer.decode(tokens[len(tokens) - after :]).strip() else 0


def _tensor_fields(message_logs: Iterable[Sequence[Mapping[str, Any]]]) -> dict[str, torch.dtype]:
    """The per-token fields that occur, with their dtypes."""
    fields: dict[str, torch.dtype] = {"token_ids": torch.int64}
    for log in message_logs:
        for message in log:
            for key, value in message.items():
                if isinstance(value, torch.Tensor):
                    fields.setdefault(key, value.dtype)
    return fields


def _flat(message_log: Sequence[Mapping[str, Any]], fields: Mapping[str, torch.dtype]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key in dict.fromkeys(key for message in message_log for key in message):
        if key not in fields:
            flat[key] = [message.get(key) for message in message_log]
    for key, dtype in fields.items():
        parts = [_tokens_of(message, key, dtype) for message in message_log]
        flat[key] = torch.cat(parts) if parts else torch.empty(0, dtype=dtype)
    return flat


def _tokens_of(message: Mapping[str, Any], key: str, dtype: torch.dtype) -> torch.Tensor:
    length = len(_tokenized(message))
    value: torch.Tensor = message.get(key, torch.full((length,), pad_value(key), dtype=dtype))
    if len(value) != length:
        raise DataError(f"a {message['role']!r} message has {length} token_ids and {len(value)} {key}: one a token")
    return value


def _tokenized(message: Mapping[str, Any]) -> torch.Tensor:
    """The message's `token_ids`."""
    if "token_ids" not in message:
        raise DataError(
            f"A {message.get('role')!r} message has no token_ids, only {sorted(message)}: tokenize the messages first, with "
            "get_formatted_message_log."
        )
    tokens: torch.Tensor = message["token_ids"]
    return tokens
