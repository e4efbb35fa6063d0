"""The config of the datasets that the core brings: where rows come from, and what their fields mean; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeVar

from pydantic import Field, model_validator

from rl_core.config.paths import INPUT_PATH, NAME_OR_PATH
from rl_core.config.schema import DatasetConfig
from rl_core.config.written import Path as KeyPath

if TYPE_CHECKING:
    from rl_core.config.schema import RunConfig


class OnBadRow(StrEnum):
    """What a bad row does: end the run with its place, or be counted and left out."""

    ERROR = "error"
    SKIP = "skip"


class OnTooLong(StrEnum):
    """What a prompt over the limit does: be cut and dropped from training (loss_multiplier 0), or end the run."""

    DROP = "drop"
    ERROR = "error"


class RowsConfig(DatasetConfig):
    """What every source of rows has."""

    on_bad_row: OnBadRow = Field(OnBadRow.ERROR, description="Whether a bad row ends the run or is skipped and counted.")
    record_fn: str | None = Field(
        None,
        description="A function of a row's fields that gives a record, in place of the keys below: the dotted path of one, or "
        "`alpaca`, `gsm8k`, `record` or `sharegpt`.",
    )

    def changed(self) -> set[str]:
        """The keys whose values are not their defaults; a resolved config states the others as well."""
        return {key for key, info in type(self).model_fields.items() if getattr(self, key) != info.get_default()}

    def conflicts(self, run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
        """Functions and templates that do not exist, and a first row that cannot be read."""
        from rl_core.data.row_checks import row_conflicts

        yield from row_conflicts(self, run.data)


class JsonLinesSource(RowsConfig):
    """Rows of a file of JSON lines."""

    path: Annotated[Path, INPUT_PATH] = Field(description="The file: one JSON object a line.")


class ParquetSource(RowsConfig):
    """Rows of parquet files."""

    path: Annotated[Path, INPUT_PATH] = Field(
        description="The file, or a folder of `*.parquet` files, read in the order of their names."
    )


class HuggingFaceSource(RowsConfig):
    """Rows of a dataset in Hugging Face's form."""

    path: Annotated[str, NAME_OR_PATH] = Field(
        description="A folder that `save_to_disk` wrote, a folder of data files, or the name of a dataset of the hub."
    )
    subset: str | None = Field(None, description="One of the dataset's configurations.")
    split: str | None = Field(None, description="One of its splits; may be left out where there is only one.")
    revision: str | None = Field(None, description="Of a dataset of the hub: branch, tag or commit.")


class RecordForm(RowsConfig):
    """Rows that are prompts, with answers or without, or conversations."""

    record_kind: ClassVar[Literal["conversations", "pairs"] | None] = "conversations"

    input_key: str = Field("question", description="The field that is asked: a text, or a list of {role, content} messages.")
    output_key: str | None = Field(
        "expected_answer",
        description="The field of the right answer; the environment gets it as `expected_answer`. null for none.",
    )
    response_key: str | None = Field(
        None,
        description="The field of what the assistant says, a text or a list of messages, appended at the end: for supervised "
        "training.",
    )
    tools_key: str | None = Field(
        "tools",
        description="The field with the functions that are offered to the assistant, in OpenAI's form or as its JSON. Rows may "
        "lack `tools`; a field of another name must be there (null or an empty list for none). null reads none.",
    )
    env_keys: tuple[str, ...] = Field((), description="Further fields that the environment gets, under their names.")
    stop_strings_key: str | None = Field(None, description="The field with a list of texts that end a completion.")
    prompt: Annotated[str | None, NAME_OR_PATH] = Field(
        None,
        description="A prompt template for text inputs: a path, or a packaged name such as `generic/math`. Its fields are the "
        "row's; where it has a single one that the row lacks, that is `input_key`.",
    )
    system_prompt: str | None = Field(
        None, description="A system message before every conversation that has none; in place of the template's own."
    )

    @property
    def names_tools(self) -> bool:
        """Whether `tools_key` names another field than the default, which rows must then have."""
        return "tools_key" in self.changed()

    @model_validator(mode="after")
    def _one_maker_of_records(self) -> RecordForm:
        return _refuse_beside_record_fn(self, {*RecordForm.model_fields} - {*RowsConfig.model_fields, "system_prompt"})


class PreferenceForm(RowsConfig):
    """Rows that have a better and a worse answer to a prompt."""

    record_kind: ClassVar[Literal["conversations", "pairs"] | None] = "pairs"

    prompt_key: str = Field(
        "prompt",
        description="The field that is asked: a text, or a list of {role, content} messages. Where a row lacks it, the prompt "
        "is what both conversations begin with.",
    )
    chosen_key: str = Field("chosen", description="The field of the better answer: a text, or a list of messages.")
    rejected_key: str = Field("rejected", description="The field of the worse answer, likewise.")
    tools_key: str | None = Field(
        "tools",
        description="The field with the functions that are offered to the assistant, in OpenAI's form or as its JSON. Rows may "
        "lack `tools`; a field of another name must be there (null or an empty list for none). null reads none.",
    )
    completions_key: str = Field(
        "completions",
        description="In rows without a chosen answer: the field with a list of {completion, rank}, rank 0 the best, or of "
        "{completion, score}, the highest score the best.",
    )
    pairing: Literal["best_worst", "all"] = Field(
        "best_worst",
        description="What ranked answers become: one pair of the best and the worst, or a pair of every two that differ in "
        "rank or score.",
    )
    margin_key: str = Field(
        "margin",
        description="The field that says by how much the better answer's score should lead, a number; 0 in rows that lack it. "
        "Reward models read it.",
    )
    system_prompt: str | None = Field(None, description="A system message before every conversation that has none.")

    @property
    def names_tools(self) -> bool:
        """Whether `tools_key` names another field than the default, which rows must then have."""
        return "tools_key" in self.changed()

    @model_validator(mode="after")
    def _one_maker_of_records(self) -> PreferenceForm:
        keys = {"prompt_key", "chosen_key", "rejected_key", "completions_key", "tools_key"}
        return _refuse_beside_record_fn(self, keys)


class JsonlDatasetConfig(RecordForm, JsonLinesSource):
    """Prompts or conversations of a file of JSON lines."""

    dataset_name: str = Field("jsonl", description="The dataset component, or a dotted path.")


class ParquetDatasetConfig(RecordForm, ParquetSource):
    """Prompts or conversations of parquet files."""

    dataset_name: str = Field("parquet", description="The dataset component, or a dotted path.")


class HuggingFaceDatasetConfig(RecordForm, HuggingFaceSource):
    """Prompts or conversations of a dataset in Hugging Face's form."""

    dataset_name: str = Field("huggingface", description="The dataset component, or a dotted path.")


class PreferenceDatasetConfig(PreferenceForm, JsonLinesSource):
    """Preferences of a file of JSON lines."""

    dataset_name: str = Field("preference", description="The dataset component, or a dotted path.")


class ParquetPreferenceDatasetConfig(PreferenceForm, ParquetSource):
    """Preferences of parquet files."""

    dataset_name: str = Field("preference_parquet", description="The dataset component, or a dotted path.")


class HuggingFacePreferenceDatasetConfig(PreferenceForm, HuggingFaceSource):
    """Preferences of a dataset in Hugging Face's form."""

    dataset_name: str = Field("preference_huggingface", description="The dataset component, or a dotted path.")


ConfigT = TypeVar("ConfigT", bound=RowsConfig)


def _refuse_beside_record_fn(config: ConfigT, keys: set[str]) -> ConfigT:
    unread = sorted(keys & config.changed())
    if config.record_fn is not None and unread:
        raise ValueError(f"record_fn makes the records, so that nobody reads {', '.join(unread)}: keep one of the two")
    return config
