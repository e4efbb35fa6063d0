"""Conversations as tokens: message logs, their loss masks and flat batches.

A message log is a list of {role, content, token_ids, ...}. The concatenated `token_ids` are *the* training sequence, so they
must equal the tokens of the whole conversation as rendered by the chat template.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NotRequired, TypedDict

import torch

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.images import RowImage
from rl_core.data.schema import pad_value
from rl_core.data.shared_prefix import cat_right_padded
from rl_core.data.tokenizer import decode, encode, plain_pieces
from rl_core.errors import DataError
from rl_train.data.answer_spans import LocatedText, Render, encode_pieces, locate_trained
from rl_train.data.chat_template import check_names, form_for, refuse_tools, render, unclosed, with_normalized_calls
from rl_train.data.image_sources import image_parts
from rl_train.data.special_tokens import guarded

Message = dict[str, Any]
MessageLog = list[Message]


class DatumSpec(TypedDict):
    """One prompt (or conversation), tokenized.

    Attributes:
        message_log: Messages with `token_ids` [t] int64, and `images`, a list of `RowImage`, if their tokens have any.
        length: Total number of tokens.
        extra_env_info: The environment's data for the row; None for a plain conversation.
        loss_multiplier: 0.0 excludes the row from training, else 1.0.
        idx: Index of the row in its dataset.
        task_name: Environment that responds and scores.
        stop_strings: Strings that end a completion, or None.
        tools: The functions offered to the model.
        prefill: The beginning of the answer, which the prompt ends with.
        label: Whether an answer with a label is desirable.
    """

    message_log: MessageLog
    length: int
    extra_env_info: dict[str, Any] | None
    loss_multiplier: float
    idx: int
    task_name: NotRequired[str]
    stop_strings: NotRequired[list[str] | None]
    tools: NotRequired[list[dict[str, Any]] | None]
    prefill: NotRequired[str]
    label: NotRequired[bool]


class PreferenceDatumSpec(TypedDict):
    """One prompt with a chosen and a rejected answer, both tokenized with the prompt; fields as in `DatumSpec`.

    `margin` is the required score margin of the chosen answer; 0.0 by default.
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
    trained: Collection[int] | None = None,
    images: Sequence[RowImage] = (),
) -> MessageLog:
    """Add `token_ids` [t] int64 to the messages; concatenated, they are the tokens of the whole conversation.

    With a chat template, the conversation is rendered once, as a whole. The tokens of a trained message are those that a model
    would sample; the header that opens an assistant turn belongs to the message before it. If that message is trained as well
    or does not exist, `sampled_range` is the range of the message's sampled tokens. Text of untrained messages belongs to the
    last of them before a trained one. If the template drops part of the last answer, the answer from the data follows its
    prompt instead. Tools that are offered or called must be in the tokens: see `chat_template`. Texts of control tokens in the
    messages are not control tokens, see `special_tokens.guarded`.

    Without a chat template, each content is tokenized by itself, without special tokens or text between messages. The
    tokenizer's BOS token, if any, opens the first message; its EOS token closes every assistant message.

    Args:
        message_log: Messages with `role` and `content`, and `tool_calls` in OpenAI's form.
        tokenizer: A Transformers tokenizer.
        add_generation_prompt: Whether to append the header of an assistant turn (template only); the last message is continued
            instead if it has `prefix: true`.
        tools: Offered functions, for the template.
        add_bos_token: Whether BOS opens the conversation (without a template; a template decides this itself).
        add_eos_token: Whether EOS closes assistant messages (likewise).
        trained: Indices of the trained messages; empty for a prompt. By default, all assistant messages; each of the others
            then gets its own tokens if the template allows it.
        images: The images in the contents, in their order. Each becomes part of `images` of the message with its tokens, with
            `start` relative to these.

    Raises:
        DataError: The template cannot render the conversation, or omits tools, an image or part of a trained message.
    """
    tokenizer = guarded(tokenizer, message_log, tools)
    if getattr(tokenizer, "chat_template", None):
        return _rendered_log(message_log, tokenizer, header=add_generation_prompt, tools=tools, trained=trained, images=images)
    refuse_tools(message_log, tools)
    if image_parts(message_log):
        raise DataError("the conversation has images, which require a chat template: set one (policy.tokenizer.chat_template)")
    read = unclosed(message_log) if add_generation_prompt else message_log
    pieces = plain_pieces(read, tokenizer, add_bos=add_bos_token, add_eos=add_eos_token)
    return [
        {**message, "token_ids": torch.tensor(piece, dtype=torch.int64)}
        for message, piece in zip(message_log, pieces, strict=True)
    ]


def prompt_log(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, *, tools: Any, prefill: str, images: Sequence[RowImage] = ()
) -> MessageLog:
    """The messages of a prompt with `token_ids`, which end with the generation prompt and the beginning of the answer.

    Args:
        messages: The prompt; at least one message.
        tokenizer: A Transformers tokenizer.
        tools: Offered functions.
        prefill: The beginning of the answer; empty if the model writes it all.
        images: The images in the messages.

    Raises:
        DataError: As `get_formatted_message_log`.
    """
    begun = [{"role": "assistant", "content": prefill, "prefix": True}] if prefill else []
    log = get_formatted_message_log(
        [*messages, *begun], tokenizer, add_generation_prompt=True, tools=tools, trained=(), images=images
    )
    for message in log[len(messages) :]:
        log[len(messages) - 1]["token_ids"] = torch.cat([log[len(messages) - 1]["token_ids"], message["token_ids"]])
    return log[: len(messages)]


def trained_messages(
    message_log: Sequence[Mapping[str, Any]], roles_to_train_on: Sequence[str] = ("assistant",), only_unmask_final: bool = False
) -> list[int]:
    """Indices of the trained messages: those with these roles, or only the last of them, without `weight: 0`."""
    trained = [number for number, message in enumerate(message_log) if message["role"] in roles_to_train_on]
    trained = trained[-1:] if only_unmask_final else trained
    return [number for number in trained if message_log[number].get("weight") != 0]


def add_loss_mask_to_message_log(
    message_logs: Iterable[MessageLog],
    roles_to_train_on: Sequence[str] = ("assistant",),
    only_unmask_final: bool = False,
    *,
    tokenizer: Any = None,
) -> None:
    """Set `token_loss_mask` [t] float32 of every message in place: 1 on the tokens of a trained message, else 0.

    A message with `weight: 0` is not trained, whatever its role. With a tokenizer, white space after the special token that
    closes a turn (the line break after `<|im_end|>`) is not trained either, because a model stops before it.

    Args:
        message_logs: Message logs with `token_ids`.
        roles_to_train_on: Roles to train on.
        only_unmask_final: Train only the last message of these roles.
        tokenizer: Provides the special tokens; if None, all tokens of a message are trained.

    Raises:
        DataError: A message has no `token_ids`.
    """
    for log in message_logs:
        trained = trained_messages(log, roles_to_train_on, only_unmask_final)
        for number, message in enumerate(log):
            is_trained = number in trained
            tokens = _tokenized(message)
            mask = torch.zeros_like(tokens, dtype=torch.float32)
            if is_trained:
                start, end = message.get("sampled_range", (0, len(mask)))
                sampled = tokens[start:end].tolist()
                mask[start : end - (0 if tokenizer is None else _never_sampled(sampled, tokenizer))] = 1.0
            message["token_loss_mask"] = mask


def message_log_to_flat_messages(message_log: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Flatten a message log: per-token tensors are concatenated to [T], other fields become lists over messages.

    `images` are those of all messages, with `start` relative to the whole; None without any. If a message lacks another field,
    a per-token field gets its padding value (0.0 log-probs on a prompt), and others None.

    Raises:
        DataError: A message has no `token_ids`, or a per-token tensor of another length.
    """
    return _flat(message_log, _tensor_fields([message_log]))


def batched_message_log_to_flat_message(
    message_logs: Sequence[Sequence[Mapping[str, Any]]],
    pad_value_dict: Mapping[str, int | float | bool] | None = None,
    make_sequence_length_divisible_by: int = 1,
) -> tuple[BatchedDataDict[Any], torch.Tensor]:
    """Flatten message logs into one right-padded batch, and return the rows' lengths.

    Args:
        message_logs: B message logs.
        pad_value_dict: Padding value by key; defaults to `schema.pad_value`. Set `token_ids` to the tokenizer's padding id.
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
    """The first index at which two sequences (or texts) differ; the shorter length if one is a prefix of the other."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _rendered_log(
    message_log: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    header: bool,
    tools: list[dict[str, Any]] | None,
    trained: Collection[int] | None,
    images: Sequence[RowImage],
) -> MessageLog:
    messages = with_normalized_calls(message_log)
    form = form_for(messages, tokenizer, tools=tools)

    def rendered(some: Sequence[Mapping[str, Any]], *, header: bool) -> str:
        return render(some, tokenizer, form=form, add_generation_prompt=header, tools=tools, images=images)

    wanted = trained_messages([{"role": message["role"]} for message in messages]) if trained is None else trained
    located = locate_trained(
        messages,
        wanted,
        rendered,
        header=header,
        special_tokens=tokenizer.get_added_vocab,
        end_token=tokenizer.eos_token,
    )
    check_names(messages, located.text, located.spans, tools=tools)
    cuts = sorted({cut for span in located.spans.values() for cut in span} - {0, len(located.text)})
    pieces = encode_pieces(located.text, cuts, tokenizer)
    tokens = torch.tensor([token for piece in pieces for token in piece], dtype=torch.int64)
    # The token that starts at each character; the last entry wins, so an empty text has no tokens.
    index = dict(zip([0, *cuts, len(located.text)], accumulate(map(len, pieces), initial=0), strict=False))
    starts = [index[start] for start in _starts(len(messages), located)] + [len(tokens)]
    if trained is None:
        _divide_untrained(starts, messages, located, rendered, index, tokens.tolist(), tokenizer)
    log: MessageLog = []
    for number, (message, start, end) in enumerate(zip(message_log, starts, starts[1:], strict=False)):
        log.append({**message, "token_ids": tokens[start:end]})
        first, stop = (index[cut] for cut in located.spans.get(number, (0, 0)))
        if number in located.spans and (first, stop) != (start, end):
            log[-1]["sampled_range"] = (first - start, stop - start)
    return _with_images(log, images, tokens.tolist()) if images else log


def _with_images(log: MessageLog, images: Sequence[RowImage], tokens: Sequence[int]) -> MessageLog:
    """The log whose messages have the images in their tokens."""
    from rl_train.data.images import located

    placed, end = located(images, tokens), 0
    for message in log:
        start, end = end, end + len(message["token_ids"])
        message.pop("images", None)
        if own := [image.moved(-start) for image in placed if start <= image.start < end]:
            message["images"] = own
    return log


def images_of(log: Iterable[Mapping[str, Any]]) -> list[RowImage] | None:
    """The images of a message log, with `start` relative to the whole; None if it has none."""
    images: list[RowImage] = []
    start = 0
    for message in log:
        images += [image.moved(start) for image in message.get("images") or ()]
        start += len(message["token_ids"])
    return images or None


def _starts(count: int, located: LocatedText) -> list[int]:
    """The character at which each message's share of the text starts."""
    starts = [0]
    for number in range(1, count):
        if number - 1 in located.spans:
            starts.append(located.spans[number - 1][1])
        elif number in located.spans:
            starts.append(located.spans[number][0])
        else:
            starts.append(starts[-1])
    return starts


def _divide_untrained(
    starts: list[int],
    messages: Sequence[Mapping[str, Any]],
    located: LocatedText,
    rendered: Render,
    index: Mapping[int, int],
    tokens: Sequence[int],
    tokenizer: Any,
) -> None:
    """Give each untrained message its own tokens, in place, if template and tokenizer allow it."""
    for number in range(1, len(messages)):
        if {number - 1, number} & located.spans.keys():
            continue
        try:
            before = rendered(messages[:number], header=False)
        except DataError:
            continue
        last = max((cut for cut in index if cut <= len(before)), default=0)
        own = encode(before[last:], tokenizer)
        begins = index[last]
        if located.text.startswith(before) and tokens[begins : begins + len(own)] == own:
            starts[number] = max(starts[number - 1], begins + len(own))


def _never_sampled(tokens: Sequence[int], tokenizer: Any) -> int:
    """Number of tokens at the end that are white space after a special token."""
    special = set(getattr(tokenizer, "all_special_ids", ()))
    after = next((count for count, token in enumerate(reversed(tokens)) if token in special), 0)
    return after if after and not decode(tokenizer, tokens[len(tokens) - after :]).strip() else 0


def _tensor_fields(message_logs: Iterable[Sequence[Mapping[str, Any]]]) -> dict[str, torch.dtype]:
    """The per-token fields of the logs, with their dtypes."""
    fields: dict[str, torch.dtype] = {"token_ids": torch.int64}
    for log in message_logs:
        for message in log:
            for key, value in message.items():
                if isinstance(value, torch.Tensor):
                    fields.setdefault(key, value.dtype)
                    if key == "token_ids" and value.is_floating_point():
                        raise DataError(
                            f"`token_ids` of a message have dtype {value.dtype}: {value.tolist()[:8]}. Pass integers."
                        )
    return fields


def _flat(message_log: Sequence[Mapping[str, Any]], fields: Mapping[str, torch.dtype]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key in dict.fromkeys(key for message in message_log for key in message):
        if key not in fields:
            flat[key] = images_of(message_log) if key == "images" else [message.get(key) for message in message_log]
    for key, dtype in fields.items():
        parts = [_tokens_of(message, key, dtype) for message in message_log]
        flat[key] = torch.cat(parts) if parts else torch.empty(0, dtype=dtype)
    return flat


def _tokens_of(message: Mapping[str, Any], key: str, dtype: torch.dtype) -> torch.Tensor:
    length = len(_tokenized(message))
    value: torch.Tensor = message.get(key, torch.full((length,), pad_value(key), dtype=dtype))
    if len(value) != length:
        raise DataError(f"a {message['role']!r} message has {length} token_ids but {len(value)} {key}: the numbers must match")
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
