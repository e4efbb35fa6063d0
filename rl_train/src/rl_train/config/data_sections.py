"""The section `data` and its subsections: datasets, prompts, splits. Does not import torch."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import Field, model_validator

from rl_core.config.diagnostics import dotted
from rl_core.config.schema import DatasetConfig
from rl_core.config.section import INPUT_PATH, NAME_OR_PATH, Section
from rl_core.plugins.component import Kind
from rl_train.config.slots import sections_at, slots_of

DatasetT = TypeVar("DatasetT", bound=DatasetConfig)

_PROMPT_KEYS = {"prompt_config": "prompt", "system_prompt": "system_prompt", "examples_type": "examples_type"}
"""Keys of `data.prompt`, and the keys of a dataset that they are the defaults of."""


class PromptConfig(Section):
    """How records are converted to messages, for all datasets that do not configure it themselves (`data.prompt`)."""

    prompt_config: Annotated[str | None, NAME_OR_PATH] = None
    """Prompt config: the name of a packaged one such as `generic/math`, or a path."""
    system_prompt: str | None = None
    """System message; defaults to the one of the prompt config."""
    examples_type: Annotated[str | None, NAME_OR_PATH] = None
    """Few-shot examples: the name of a packaged list such as `math_worked`, or the path of a YAML or JSON Lines file. Defaults
    to the examples of the prompt config."""


class SplitConfig(Section):
    """Holds out rows of the training data for validation (`data.split`)."""

    validation: float = Field(gt=0.0, lt=1.0)
    """Fraction of rows to hold out, at random. Rows are selected by a hash of their prompt, so rows with the same prompt are
    never split, and adding or reordering rows does not move others."""
    seed: int = 0
    """Seed that determines which rows are held out."""


class ImagesConfig(Section):
    """Limits of images in rows (`data.images`)."""

    max_file_mib: int = Field(default=32, ge=1)
    """Largest size of an image file, in MiB. A row with a larger one is a bad row."""
    max_megapixels: int = Field(default=64, ge=1)
    """Largest number of pixels of an image before it is resized, in millions. A row with a larger one is a bad row."""
    cache_mib: int = Field(default=1024, ge=0)
    """Memory for images that are kept after they were resized, in MiB, so that a row that is drawn again soon is not read
    again."""


class DataConfig(Section):
    """Training and validation data (`data`)."""

    train: DatasetConfig | None = None
    """Training data."""
    mix: dict[str, DatasetConfig] = Field(default_factory=dict)
    """Training data from several datasets, used instead of `train`. Keys are names of your choice; each dataset has a
    `weight`."""
    split: SplitConfig | None = None
    """Hold out validation data from the training data, used instead of `validation`."""
    validation: DatasetConfig | None = None
    """Validation data."""
    validation_sets: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")], DatasetConfig] = Field(
        default_factory=dict
    )
    """More validation data. Keys are names of your choice; the metrics of each set are `validation/<name>/...`, and its rows
    are scored by the environment of their task. `val_at_start` and `val_at_end` apply to all sets."""
    train_data_path: Annotated[str | None, INPUT_PATH] = None
    """Short for `train: {dataset_name: jsonl, path: ...}`."""
    val_data_path: Annotated[str | None, INPUT_PATH] = None
    """Short for `validation: {dataset_name: jsonl, path: ...}`."""
    prompt: PromptConfig | None = None
    """How records are converted to messages, for all datasets that do not configure it themselves."""
    max_input_seq_length: int | None = Field(default=None, ge=1)
    """Maximum number of prompt tokens. Defaults to the policy's `max_total_sequence_length` minus one."""
    on_long_prompt: Literal["error", "drop"] = "error"
    """What happens to longer prompts: `error` ends the run, `drop` drops and counts them."""
    check_rows: int = Field(default=2000, ge=0)
    """Number of training rows and of validation rows to tokenize before the run starts, in the order in which they are drawn.
    A row among them that is too long, or that the chat template cannot render, ends the run at once. 0 checks only the first
    row."""
    shuffle: bool = True
    """Whether to shuffle the training data each epoch."""
    images: ImagesConfig = Field(default_factory=ImagesConfig)
    """Limits of images in rows."""

    @model_validator(mode="after")
    def _one_source_each(self) -> DataConfig:
        train, validation = self.train or self.train_data_path is not None, self.validation or self.val_data_path is not None
        for data, one, other, are_both in (
            ("training", "train", "train_data_path", self.train and self.train_data_path is not None),
            ("training", "mix", "train", self.mix and train),
            ("validation", "validation", "val_data_path", self.validation and self.val_data_path is not None),
            ("validation", "split", "validation", self.split and validation),
        ):
            if are_both:
                hint = ", or add data.split=null" if one == "split" else ""
                raise ValueError(f"{one} and {other} both define the {data} data: keep one of them{hint}")
        for key, section in self.sections().items():
            if section.weight is not None and not key.startswith("mix."):
                raise ValueError(f"{key}.weight has no effect: weights apply only to the datasets of mix")
            if section.val_period is not None and not key.startswith("validation_sets."):
                raise ValueError(f"{key}.val_period has no effect: it applies only to the datasets of validation_sets")
        return self

    @model_validator(mode="after")
    def _prompt_settings_have_a_template(self) -> DataConfig:
        for name, section in self.sections().items():
            for asked, key in _PROMPT_KEYS.items():
                if self.prompt is None or getattr(self.prompt, asked) is None:
                    continue
                has_no_template = key != "system_prompt" and getattr(section, "record_fn", None)
                if key not in type(section).model_fields or has_no_template:
                    raise ValueError(
                        f"prompt.{asked} applies to all datasets, but {name} ({section.dataset_name}) has no template: set "
                        f"`{key}` in the sections of the datasets that do"
                    )
        return self

    @property
    def has_training_data(self) -> bool:
        """Whether training data is configured."""
        return self.train is not None or bool(self.mix)

    @property
    def has_validation_data(self) -> bool:
        """Whether validation data is configured."""
        return bool(self.validation or self.validation_sets) or (self.split is not None and self.has_training_data)

    def with_prompt(self, section: DatasetT) -> DatasetT:
        """A dataset's section, with those keys of `prompt` that it does not set itself."""
        if self.prompt is None:
            return section
        defaults = {asked: getattr(self.prompt, key) for key, asked in _PROMPT_KEYS.items()}
        if defaults["prompt"] is None and getattr(section, "prompt", None) is None:
            del defaults["examples_type"]  # they belong to a prompt config
        return section.model_copy(
            update={key: value for key, value in defaults.items() if value is not None and getattr(section, key, None) is None}
        )

    def training_prompts(self) -> list[PromptConfig]:
        """How the training datasets convert records to messages, without repetitions; empty if none configures it."""
        prompts: list[PromptConfig] = []
        for section in filter(None, [self.train, *self.mix.values()]):
            used = self.with_prompt(section)
            prompt = PromptConfig(**{asked: getattr(used, key, None) for asked, key in _PROMPT_KEYS.items()})
            if prompt not in prompts:
                prompts.append(prompt)
        return [] if prompts == [PromptConfig()] else prompts

    def sections(self) -> dict[str, DatasetConfig]:
        """The sections of all datasets, by their keys within `data`."""
        slots = [slot.path for slot in slots_of(Kind.DATASET)]
        return {dotted(key): section for path in slots for key, section in sections_at(self, path[1:])}
