"""The config of the datasets that the core brings; imports no torch."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class OnBadRow(StrEnum):
    """What a bad row does: end the run with its place, or be counted and left out."""

    ERROR = "error"
    SKIP = "skip"


class OnTooLong(StrEnum):
    """What a prompt over the limit does: be cut and dropped from training (loss_multiplier 0), or end the run."""

    DROP = "drop"
    ERROR = "error"


class JsonlDatasetConfig(BaseModel):
    """A dataset of JSON lines."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path = Field(description="The file: one JSON object a line.")
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
    prompt: str | None = Field(
        None, description="A prompt template: a path, or a packaged name such as `generic/math`; for text inputs."
    )
    system_prompt: str | None = Field(None, description="A system message before every conversation that has none.")
    on_bad_row: OnBadRow = Field(OnBadRow.ERROR, description="Whether a bad row ends the run or is skipped and counted.")
