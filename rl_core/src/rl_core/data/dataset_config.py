"""The config of the datasets that the core brings; imports no torch."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from rl_core.config.paths import INPUT_PATH, NAME_OR_PATH
from rl_core.config.schema import DatasetConfig


class OnBadRow(StrEnum):
    """What a bad row does: end the run with its place, or be counted and left out."""

    ERROR = "error"
    SKIP = "skip"


class OnTooLong(StrEnum):
    """What a prompt over the limit does: be cut and dropped from training (loss_multiplier 0), or end the run."""

    DROP = "drop"
    ERROR = "error"


class JsonlDatasetConfig(DatasetConfig):
    """A dataset of JSON lines."""

    dataset_name: str = Field("jsonl", description="The dataset component, or a dotted path.")
    path: Annotated[Path, INPUT_PATH] = Field(description="The file: one JSON object a line.")
    input_key: str = Field("question", description="The field that is asked: a text, or a list of {role, content} messages.")
    output_key: str | None = Field(
        "expected_answer",
        description="The field of the right answer; the environment gets it as `expected_answer`. null for none.",
    )
    response_key: str | None = Field(
        None, description="The field of an assistant's text, appended as the last message: for supervised training."
    )
    env_keys: tuple[str, ...] = Field((), description="Further fields that the environment gets, under their names.")
    stop_strings_key: str | None = Field(None, description="The field with a list of texts that end a completion.")
    task_name: str = Field("default", description="Which environment answers and scores.")
    prompt: Annotated[str | None, NAME_OR_PATH] = Field(
        None, description="A prompt template: a path, or a packaged name such as `generic/math`; for text inputs."
    )
    system_prompt: str | None = Field(None, description="A system message before every conversation that has none.")
    on_bad_row: OnBadRow = Field(OnBadRow.ERROR, description="Whether a bad row ends the run or is skipped and counted.")


class PreferenceDatasetConfig(DatasetConfig):
    """A dataset of JSON lines with a better and a worse answer to each prompt."""

    dataset_name: str = Field("preference", description="The dataset component, or a dotted path.")
    path: Annotated[Path, INPUT_PATH] = Field(description="The file: one JSON object a line.")
    prompt_key: str = Field(
        "prompt",
        description="The field that is asked: a text, or a list of {role, content} messages. Where a row lacks it, the prompt "
        "is what both conversations begin with.",
    )
    chosen_key: str = Field("chosen", description="The field of the better answer: a text, or a list of messages.")
    rejected_key: str = Field("rejected", description="The field of the worse answer, likewise.")
    completions_key: str = Field(
        "completions",
        description="In rows without a chosen answer: the field with a list of {completion, rank}, rank 0 the best.",
    )
    pairing: Literal["best_worst", "all"] = Field(
        "best_worst",
        description="What ranked answers become: one pair of the best and the worst, or a pair of every two ranks.",
    )
    system_prompt: str | None = Field(None, description="A system message before every conversation that has none.")
    on_bad_row: OnBadRow = Field(OnBadRow.ERROR, description="Whether a bad row ends the run or is skipped and counted.")
