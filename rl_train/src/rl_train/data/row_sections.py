"""Base sections of the built-in datasets: where rows come from, and what their fields mean. Does not import torch."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rl_core.config.schema import DatasetConfig, RecordKind
from rl_core.config.section import INPUT_PATH, NAME_OR_PATH


class OnBadRow(StrEnum):
    """How an invalid row is handled: end the run with the location of the row, or skip and count it."""

    ERROR = "error"
    SKIP = "skip"


class OnTooLong(StrEnum):
    """How a prompt over the limit is handled: truncate it and drop it from training (loss_multiplier 0), or end the run."""

    DROP = "drop"
    ERROR = "error"


class RowsConfig(DatasetConfig):
    """Base section of all sources of rows."""

    on_bad_row: OnBadRow = Field(OnBadRow.ERROR, description="Whether an invalid row ends the run or is skipped and counted.")
    record_fn: str | None = Field(
        None,
        description="Function that converts the fields of a row to a record, used instead of the keys below: a dotted path, "
        "or `alpaca`, `gsm8k`, `record`, `sharegpt`, or a layout of public benchmarks: `boolq`, `gpqa`, `humaneval`, `mbpp`, "
        "`multiple_choice`, `piqa`, `triviaqa`, `truthfulqa` or `winogrande`.",
    )

    images_key: str | None = Field(
        "images",
        description="Field with the images of the row, a list or a single one. They belong to the image parts of the "
        "messages without an image, or in front of the first message of the user if there are none. With the "
        "default `images`, rows may lack the field, or have it as `image`; any other field must exist. null leaves both out, "
        "also of the rows that `record_fn` gets.",
    )

    @property
    def nested_fields(self) -> tuple[str, ...]:
        """The nested fields that the keys of this section name."""
        values = [value for key, value in self if key.endswith(("_key", "_keys"))]
        names = [name for value in values for name in ([value] if isinstance(value, str) else value or ())]
        return tuple(name for name in names if "." in name)

    @property
    def names_tools(self) -> bool:
        """Whether `tools_key` names a field other than the default, which rows must then have."""
        return "tools_key" in self.changed()

    @property
    def names_images(self) -> bool:
        """Whether `images_key` names a field other than the default, which rows must then have."""
        return "images_key" in self.changed()

    def changed(self) -> set[str]:
        """The keys whose values differ from their defaults; a resolved config also states the defaults."""
        return {key for key, info in type(self).model_fields.items() if getattr(self, key) != info.get_default()}

    def _without_record_fn_or(self, keys: set[str]) -> Self:
        unused = sorted(keys & self.changed())
        if self.record_fn is not None and unused:
            raise ValueError(
                f"record_fn creates the records, so {', '.join(unused)} would have no effect: remove either record_fn or these "
                "keys"
            )
        return self


class JsonLinesSource(RowsConfig):
    """Rows of a JSON Lines file."""

    path: Annotated[Path, INPUT_PATH] = Field(description="JSON Lines file: one JSON object per line.")


class ParquetSource(RowsConfig):
    """Rows of Parquet files."""

    path: Annotated[Path, INPUT_PATH] = Field(
        description="Parquet file, or a folder of `*.parquet` files, read in alphabetical order."
    )


class HuggingFaceSource(RowsConfig):
    """Rows of a Hugging Face dataset."""

    path: Annotated[str, NAME_OR_PATH] = Field(
        description="Folder written by `save_to_disk`, folder of data files, or name of a dataset on the hub."
    )
    subset: str | None = Field(None, description="Configuration (subset) of the dataset.")
    split: str | None = Field(None, description="Split of the dataset. Optional if there is only one.")
    revision: str | None = Field(None, description="Branch, tag or commit of a dataset on the hub.")


class RecordFields(RowsConfig):
    """Rows that are prompts, with or without answers, or conversations."""

    record_kind: ClassVar[RecordKind | None] = "conversations"

    input_key: str = Field("question", description="Field with the prompt: text, or a list of {role, content} messages.")
    output_key: str | None = Field(
        "expected_answer",
        description="Field with the correct answer, which the environment receives as `expected_answer`. null for none. With "
        "`response_key` and the default `expected_answer`, rows may lack the field.",
    )
    response_key: str | None = Field(
        None,
        description="Field with the assistant's response, text or a list of messages, appended to the prompt. Used for "
        "supervised training.",
    )
    tools_key: str | None = Field(
        "tools",
        description="Field with the tools available to the assistant, in OpenAI's format or as JSON text. With the default "
        "`tools`, rows may lack the field; any other field must exist (null or an empty list for none). null "
        "disables tools.",
    )
    env_keys: tuple[str, ...] = Field(
        (),
        description="Additional fields passed to the environment under their own names. A nested field, such as "
        "`extra_info.level`, has its last name (`level`).",
    )
    continue_final_message: bool | None = Field(
        None,
        description="Whether the model continues a final message of the assistant in a prompt, as the beginning of its answer; "
        "otherwise that message is left out. By default true for prompts in the field `prompt`, as in TRL. Supervised training "
        "is not affected.",
    )
    stop_strings_key: str | None = Field(None, description="Field with a list of strings that end a completion.")
    prompt: Annotated[str | None, NAME_OR_PATH] = Field(
        None,
        description="Prompt config for text inputs: a path, or the name of a packaged one such as `generic/math`. Its "
        "placeholders are fields of the row. If it has only one placeholder and the row lacks that field, `input_key` is used "
        "for it.",
    )
    examples_type: Annotated[str | None, NAME_OR_PATH] = Field(
        None,
        description="Few-shot examples of the prompt config: the name of a packaged list such as `math_worked`, or the path of "
        "a YAML or JSON Lines file. Defaults to the examples of the prompt config.",
    )
    system_prompt: str | None = Field(
        None, description="System message for every conversation that has none, replacing the one of the template."
    )

    @property
    def continues_answers(self) -> bool | None:
        """Whether the last message of a prompt begins its answer; None if this is not known."""
        if self.response_key is not None or self.record_fn is not None:
            return False
        return True if self.continue_final_message is None and self.input_key == "prompt" else self.continue_final_message

    @property
    def may_lack_output(self) -> bool:
        """Whether rows may lack the field of `output_key`."""
        return self.response_key is not None and "output_key" not in self.changed()

    @model_validator(mode="after")
    def _env_keys_differ(self) -> RecordFields:
        names = [key.rpartition(".")[2] for key in self.env_keys]
        if twice := sorted({key for key, name in zip(self.env_keys, names, strict=True) if names.count(name) > 1}):
            raise ValueError(f"the environment would get {' and '.join(twice)} under the same name: keep one of these env_keys")
        return self

    @model_validator(mode="after")
    def _keys_exclude_record_fn(self) -> RecordFields:
        return self._without_record_fn_or({*RecordFields.model_fields} - {*RowsConfig.model_fields, "system_prompt"})


class PreferenceFields(RowsConfig):
    """Rows with a prompt, a chosen and a rejected answer, or with a prompt, an answer and a label."""

    record_kind: ClassVar[RecordKind | None] = "pairs"

    prompt_key: str = Field(
        "prompt",
        description="Field with the prompt: text, or a list of {role, content} messages. If a row lacks it, the prompt is "
        "the common beginning of both conversations.",
    )
    chosen_key: str = Field("chosen", description="Field with the better answer: text, or a list of messages.")
    rejected_key: str = Field("rejected", description="Field with the worse answer, in the same format.")
    tools_key: str | None = Field(
        "tools",
        description="Field with the tools available to the assistant, in OpenAI's format or as JSON text. With the default "
        "`tools`, rows may lack the field; any other field must exist (null or an empty list for none). null "
        "disables tools.",
    )
    completions_key: str = Field(
        "completions",
        description="For rows without a chosen answer: field with a list of {completion, rank}, where rank 0 is the best, or "
        "of {completion, score}, where the highest score is the best.",
    )
    pairing: Literal["best_worst", "all"] = Field(
        "best_worst",
        description="`best_worst` pairs the best answer with the worst; `all` pairs every two answers that differ in rank or "
        "score.",
    )
    margin_key: str = Field(
        "margin",
        description="Field with the margin of the pair, a number that reward model training subtracts from the difference of "
        "the two scores; 0 for rows that lack it.",
    )
    label_key: str | None = Field(
        None,
        description="For rows with one answer instead of a pair, for KTO: field with its label, which is true or 1 if the "
        "answer is desirable, and false or 0 if not, also as text. By default, rows are pairs.",
    )
    completion_key: str = Field(
        "completion", description="With `label_key`: field with the answer, text or a list of messages."
    )
    split_pairs: bool = Field(
        False,
        description="Whether each pair becomes two answers with a label, for KTO, of which the chosen one is desirable.",
    )
    system_prompt: str | None = Field(None, description="System message for every conversation that has none.")

    @property
    def kind_of_records(self) -> RecordKind | None:
        return "unpaired" if self.label_key is not None or self.split_pairs else self.record_kind

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> PreferenceFields:
        unused = {"margin_key"} if self.kind_of_records == "unpaired" else set()
        of_pairs = {"chosen_key", "rejected_key", "completions_key", "pairing", "split_pairs"}
        unused |= {"completion_key"} if self.label_key is None else of_pairs
        if ignored := ", ".join(sorted(unused & self.changed())):
            rows = "answers with a label" if self.kind_of_records == "unpaired" else "pairs, as label_key is not set"
            raise ValueError(f"rows become {rows}, so {ignored} would have no effect: remove it")
        fields = {"prompt_key", "chosen_key", "rejected_key", "completions_key", "completion_key", "tools_key"}
        return self._without_record_fn_or(fields)
