"""What a run would read from its data: rendered rows, lengths in tokens, duplicates (`rlcore data show`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from rl_core.data.tokenizer import decode
from rl_train.assembly.data import Source, conversation_loader, preference_loader, prompt_loader
from rl_train.assembly.preparation import Preparation
from rl_train.config.schema import RunConfig
from rl_train.data.arrow_rows import ConcatDataset
from rl_train.data.holdout import prompt_digest, row_location
from rl_train.data.image_sources import image_parts
from rl_train.data.messages import images_of
from rl_train.prompts.prompt_files import read_prompt
from rl_train.rollouts.records import expected_answer

_LOCATED = 3
"""Number of rows of each problem whose location is given."""
_UNLIMITED = 1_000_000_000
"""A row limit that no row reaches, so that lengths are measured before rows are cut."""


@dataclass(frozen=True, kw_only=True)
class RenderedRow:
    """A row as the model reads it, special tokens included."""

    index: int
    """Number of the row in its dataset, from 0."""
    text: str
    trained: tuple[str, ...]
    """The parts whose tokens are trained, in order; empty for prompts."""
    tokens: int
    expected: Any
    """The expected answer of a prompt; None if it has none."""
    label: bool | None
    """Whether a labelled answer is desirable; None for other kinds of rows."""


@dataclass(frozen=True, kw_only=True)
class DatasetView:
    """Facts about one dataset of a run."""

    name: str
    """`train`, `validation`, or `validation_sets.NAME`."""
    kind: str
    """What a row is: `prompts`, `conversations`, `pairs` or `unpaired` (an answer with a label)."""
    rows: int
    lengths: tuple[int, ...]
    """Length in tokens of each measured row; of a pair, the length of its longer conversation."""
    longest_row: str
    """Location of the longest measured row."""
    empty_answers: int
    """Number of measured prompts whose expected answer is empty, conversations whose last response is, pairs whose rejected
    answer is, or undesirable answers that are empty."""
    desirable: int
    """Number of measured answers with the label desirable; 0 for other kinds of rows."""
    unwritable_answers: int
    """Number of measured prompts whose expected answer has text that the tokenizer cannot represent."""
    unknown_token: str | None
    """The token that stands for text that the tokenizer cannot represent; None if it has no such token."""
    unknown: tuple[int, ...]
    """Number of these tokens in each measured row; of a pair, in both conversations."""
    unknown_in_prompt: int
    """Number of these tokens in the texts that the config adds to each row: its prompt config and its system prompt."""
    limit: int
    """Longest row in tokens that is used."""
    repeated: int
    """Number of rows whose prompt an earlier row of this dataset has."""
    shared_with_training: int
    """Number of rows whose prompt is also in the training data; 0 for the training data itself."""
    locations: Mapping[str, tuple[str, ...]]
    """Locations of the first rows that `too_long`, the two numbers of answers, `repeated` and `shared_with_training` count."""
    samples: tuple[RenderedRow, ...]

    @property
    def too_long(self) -> int:
        """Number of measured rows that are longer than the limit."""
        return sum(length > self.limit for length in self.lengths)


def view_datasets(prepared: Preparation, *, measured: int, shown: int) -> list[DatasetView]:
    """Facts about the training data and each validation set, in this order.

    Args:
        prepared: The run.
        measured: Maximum number of rows of each dataset whose length is measured, evenly spaced.
        shown: Number of rows of each dataset that are rendered, evenly spaced.

    Raises:
        DataError: A row is invalid.
    """
    data, views = prepared.data, []
    training = frozenset[bytes]()
    sets = {"validation" if name == "" else f"validation_sets.{name}": source for name, source in data.validation.items()}
    sources = {} if data.train is None else {"train": data.train}
    for name, source in {**sources, **sets}.items():
        is_training = name == "train"
        reader = _RowMeasure(prepared, source, is_training=is_training, checked=measured)
        records, digests = reader.records, reader.digests()
        training = frozenset(digests) if is_training else training
        indices = _spaced(len(digests), measured)
        lengths, unknown, answers = zip(*map(reader.measured, indices), strict=True)
        firsts = {digest: index for index, digest in reversed([*enumerate(digests)])}
        found = {
            "too_long": [index for index, length in zip(indices, lengths, strict=True) if length > reader.limit],
            "empty_answers": [
                index for index, answer in zip(indices, answers, strict=True) if isinstance(answer, str) and not answer.strip()
            ],
            "unwritable_answers": [
                index
                for index, answer in zip(indices, answers, strict=True)
                if reader.kind == "prompts" and isinstance(answer, str) and reader.unknown_tokens([answer])
            ],
            "repeated": [index for index, digest in enumerate(digests) if firsts[digest] != index],
            "shared_with_training": [index for index, digest in enumerate(digests) if digest in training and not is_training],
        }
        views.append(
            DatasetView(
                name=name,
                kind=reader.kind,
                rows=len(digests),
                lengths=lengths,
                longest_row=row_location(records, indices[lengths.index(max(lengths))]),
                empty_answers=len(found["empty_answers"]),
                desirable=sum(bool(reader.label(index)) for index in indices),
                unwritable_answers=len(found["unwritable_answers"]),
                unknown_token=reader.unknown_token,
                unknown=unknown,
                unknown_in_prompt=max(map(reader.unknown_tokens, _prompt_texts(prepared.config, name)), default=0),
                limit=reader.limit,
                repeated=len(found["repeated"]),
                shared_with_training=len(found["shared_with_training"]),
                locations={
                    name: tuple(row_location(records, index) for index in rows[:_LOCATED]) for name, rows in found.items()
                },
                samples=tuple(reader.rendered(index) for index in _spaced(len(digests), shown)),
            )
        )
    return views


class _RowMeasure:
    """Renders the rows of a dataset as its loader does, without the limit on their length."""

    def __init__(self, prepared: Preparation, source: Source, *, is_training: bool, checked: int) -> None:
        run, tokenizer = prepared.config, prepared.tokenizer
        needs = run.algorithm.runtime_needs
        unlimited, self.limit = _without_limits(run, checked), run.policy.max_total_sequence_length
        self._tokenizer = tokenizer
        # Long rows are counted here, so Transformers need not warn about the first one.
        tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
        # Some tokenizers use their end or padding token as the unknown token: those of a template are not unknown text.
        others = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
        self.unknown_token: str | None = None if tokenizer.unk_token in others else tokenizer.unk_token
        if needs.rollouts is not None or (needs.samples and not is_training):
            self.kind = "prompts"
            self.limit = run.data.max_input_seq_length or self.limit - 1
            loader = prompt_loader(source, unlimited, tokenizer, batch_size=1, shuffle=False, tools=prepared.tools)
        else:
            self.kind = run.algorithm.record_kind
            load = conversation_loader if self.kind == "conversations" else preference_loader
            loader = load(source, unlimited, tokenizer, batch_size=1, shuffle=False)
        self._rows: Any = loader.dataset
        self._parts = [rows.records for rows in getattr(self._rows, "parts", [self._rows])]
        self.records = ConcatDataset(self._parts)

    def digests(self) -> list[bytes]:
        """A digest of the prompt of each record."""
        return [prompt_digest(part, index) for part in self._parts for index in range(len(part))]

    def measured(self, index: int) -> tuple[int, int, Any]:
        """Number of tokens of a row, how many of all its tokens are unknown, and its expected answer or last response."""
        row = self._rows[index]
        length = row["length"] if self.kind != "pairs" else max(row["length_chosen"], row["length_rejected"])
        tokens = [token for log in self._logs(row) for part in log for token in part["token_ids"].tolist()]
        answer = expected_answer(row.get("extra_env_info")) if self.kind == "prompts" else self._response(index)
        return int(length), self._unknown(tokens), answer

    def label(self, index: int) -> bool | None:
        """Whether a labelled answer is desirable; None for other kinds of rows."""
        return self._rows[index]["label"] if self.kind == "unpaired" else None

    def _response(self, index: int) -> Any:
        """The last message of a conversation, or of an answer that may be empty, if the model writes it and calls no tool."""
        answer = {"conversations": "messages", "pairs": "rejected", "unpaired": "completion"}[self.kind]
        last = self.records[index].get(answer, [{}])[-1]
        return last.get("content") if last.get("role") == "assistant" and not last.get("tool_calls") else None

    def unknown_tokens(self, texts: Sequence[str]) -> int:
        """Number of unknown tokens in some texts."""
        return sum(self._unknown(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts)

    def _unknown(self, tokens: list[int]) -> int:
        return 0 if self.unknown_token is None else tokens.count(self._tokenizer.unk_token_id)

    def rendered(self, index: int) -> RenderedRow:
        """The text of a row, and the parts that are trained."""
        row = self._rows[index]
        logs = self._logs(row)
        length, _, answer = self.measured(index)
        texts = [self._text(log) for log in logs]
        trained = [text for log in logs for part in log for text in self._trained(part)]
        return RenderedRow(
            index=index,
            text="\n--- rejected ---\n".join(texts),
            trained=tuple(trained),
            tokens=length,
            expected=answer if self.kind == "prompts" else None,
            label=self.label(index),
        )

    def _text(self, log: Sequence[Mapping[str, Any]]) -> str:
        """The text of a row, with the size of each image instead of its tokens."""
        tokens = [token for message in log for token in message["token_ids"].tolist()]
        text, end = "", 0
        parts = image_parts(log)
        for part, image in zip(parts, images_of(log) or (), strict=False):  # a row that is cut has fewer images
            source = f"{part['path']}, " if "path" in part else ""
            shown = f"[image: {source}{part['width']} x {part['height']} pixels, {image.length} tokens]"
            text += decode(self._tokenizer, tokens[end : image.start]) + shown
            end = image.end
        return text + decode(self._tokenizer, tokens[end:])

    def _logs(self, row: Mapping[str, Any]) -> list[Any]:
        """The tokenized messages of a row; of a pair, those of both conversations."""
        return [row["message_log"]] if self.kind != "pairs" else [row["message_log_chosen"], row["message_log_rejected"]]

    def _trained(self, message: Mapping[str, Any]) -> list[str]:
        """The trained tokens of a message, as one text; none for a prompt."""
        mask = message.get("token_loss_mask")
        if mask is None or not bool(mask.any()):
            return []
        return [decode(self._tokenizer, message["token_ids"][mask.bool()].tolist())]


def _prompt_texts(run: RunConfig, name: str) -> Iterator[list[str]]:
    """The texts that the config adds to each row of a dataset, without placeholders; a mixture has several datasets."""
    sections = run.data.sections()
    named = [section for key, section in sections.items() if key == name or key.startswith(f"{name}.")]
    for section in named or sections.values():  # a share of the training data, if none has this name
        effective = run.data.with_prompt(section)
        texts = [getattr(effective, "system_prompt", None)]
        if (prompt := getattr(effective, "prompt", None)) is not None:
            file = read_prompt(prompt)
            texts += ["".join(part for part, *_ in Formatter().parse(text or "")) for text in (file.system, file.user)]
        yield [text for text in texts if text]


def _without_limits(run: RunConfig, checked: int) -> RunConfig:
    policy = run.policy.model_copy(update={"max_total_sequence_length": _UNLIMITED})
    return run.model_copy(
        update={"policy": policy, "data": run.data.model_copy(update={"max_input_seq_length": None, "check_rows": checked})}
    )


def _spaced(rows: int, count: int) -> Sequence[int]:
    """At most `count` indices of `rows` rows, evenly spaced from the first."""
    return range(rows) if rows <= count else [index * rows // count for index in range(count)]
