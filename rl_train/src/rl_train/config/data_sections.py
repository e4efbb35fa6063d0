"""The section `data` and its subsections: datasets, prompts, splits. Does not import torch."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from rl_core.config.diagnostics import dotted
from rl_core.config.schema import DatasetConfig
from rl_core.config.section import INPUT_PATH, NAME_OR_PATH, Section
from rl_core.plugins.component import Kind, did_you_mean, is_path
from rl_train.config.slots import sections_at, slots_of, static_attribute

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

    section: ClassVar[str] = "data.images"
    """Where the keys are, for errors."""
    max_file_mib: int = Field(default=32, ge=1)
    """Largest size of an image file, in MiB. A row with a larger one is a bad row."""
    max_megapixels: int = Field(default=64, ge=1)
    """Largest number of pixels of an image before it is resized, in millions. A row with a larger one is a bad row."""
    cache_mib: int = Field(default=1024, ge=0)
    """Memory for images that are kept after they were resized, in MiB, so that a row that is drawn again soon is not read
    again."""
    processor_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Settings of the model's image processor that replace those of its preprocessor_config.json, such as `max_pixels` of
    Qwen2.5-VL. Checkpoints have them too."""


_OF_SAMPLER = {
    "pass_rate_band": ("low", "high", "exploration", "rest", "new_weight"),
    "task_mix": ("task_temperature", "min_share", "new_weight"),
    "stages": ("key", "bounds", "at_steps", "at_reward", "window"),
}
"""The settings of each registered prompt sampler."""


class SamplerConfig(Section):
    """Which prompts are drawn next (`data.sampler`), instead of shuffled epochs. Only for algorithms that sample."""

    name: str
    """Prompt sampler. `pass_rate_band`: prefers prompts whose mean reward lies within a band; `task_mix`: mixes tasks by the
    spread of their rewards; `stages`: adds longer or more difficult prompts stage by stage; or the dotted path of a
    `PromptSampler`."""
    delay: int | None = Field(default=None, ge=0)
    """Before the draws for step s, the sampler sees the rewards of the prompts of steps up to s - 1 - delay. At least
    `rollout.max_staleness`, which is the default. With the same delay, synchronous and asynchronous runs with the same rewards
    draw the same prompts."""
    low: float = 0.2
    """For `pass_rate_band`: lower end of the band, as a mean reward."""
    high: float = 0.8
    """For `pass_rate_band`: upper end of the band. Both ends belong to it."""
    exploration: float = Field(default=0.25, ge=0.0, le=1.0)
    """For `pass_rate_band`: smallest share of the draws for prompts that were never drawn or are outside the band. While some
    were never drawn, the share is at least the fraction of the others that is in the band."""
    rest: float = Field(default=0.25, ge=0.0)
    """For `pass_rate_band`: number of draws after which a prompt of the band is drawn again, relative to the number of prompts.
    At 0.25, a prompt is drawn at most four times as often as in epochs."""
    new_weight: float | None = Field(default=None, gt=0.0, le=1.0)
    """For `pass_rate_band` and `task_mix`: weight of the newest group in the running mean of a prompt's reward or of a task's
    spread. By default 0.5 for the first and 0.05 for the second."""
    task_temperature: float = Field(default=1.0, gt=0.0)
    """For `task_mix`: shares of tasks are proportional to their spread to the power of 1 / task_temperature."""
    min_share: float = Field(default=0.05, ge=0.0, lt=1.0)
    """For `task_mix`: smallest share of a task."""
    key: str | None = None
    """For `stages`: the field of a row's metadata (`env_keys` of the dataset) that decides its stage. By default, the number of
    characters of the prompt."""
    bounds: list[float] = Field(default_factory=list)
    """For `stages`: the largest value of each stage but the last, which has all rows."""
    at_steps: list[int] = Field(default_factory=list)
    """For `stages`: the first step of each stage but the first. Set this or `at_reward`."""
    at_reward: float | None = None
    """For `stages`: the next stage begins when the mean reward of the last `window` groups of a stage reaches this value."""
    window: int = Field(default=64, ge=1)
    """For `stages` with `at_reward`: number of groups."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a sampler given by its path."""

    @property
    def uses_rewards(self) -> bool:
        """Whether the sampler needs rewards; that of a path is read from its source."""
        if is_path(self.name):
            return static_attribute(self.name, "uses_rewards") is not False
        return self.name != "stages" or self.at_reward is not None

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if not is_path(name) and name not in _OF_SAMPLER:
            suggestion = did_you_mean(name, list(_OF_SAMPLER)).rstrip()
            raise ValueError(f"unknown prompt sampler {name!r}: use {', '.join(_OF_SAMPLER)} or a dotted path.{suggestion}")
        return name

    @model_validator(mode="after")
    def _only_its_own_keys(self) -> SamplerConfig:
        used = {"name", "delay", *_OF_SAMPLER.get(self.name, ("kwargs",))}
        for key, field in type(self).model_fields.items():
            if key not in used and getattr(self, key) != field.get_default(call_default_factory=True):
                raise ValueError(f"sampler {self.name!r} does not use {key}: remove it")
        return self

    @model_validator(mode="after")
    def _has_a_band(self) -> SamplerConfig:
        if self.low >= self.high:
            raise ValueError(f"the band from low ({self.low:g}) to high ({self.high:g}) is empty: low must be below high")
        return self

    @model_validator(mode="after")
    def _has_stages(self) -> SamplerConfig:
        if self.name != "stages":
            return self
        if not self.bounds:
            raise ValueError("stages needs bounds, the largest value of each stage but the last, such as [2, 4]")
        if any(later <= earlier for earlier, later in pairwise(self.bounds)):
            raise ValueError(f"bounds is {self.bounds}: each must be larger than the one before")
        if bool(self.at_steps) == (self.at_reward is not None):
            raise ValueError("stages end at_steps or at_reward: set one of them")
        if self.at_steps and len(self.at_steps) != len(self.bounds):
            raise ValueError(f"at_steps has {len(self.at_steps)} steps, but there are {len(self.bounds)} bounds: one for each")
        if any(later <= earlier for earlier, later in pairwise([1, *self.at_steps])):
            raise ValueError(f"at_steps is {self.at_steps}: they must be above 1, and each larger than the one before")
        default = type(self).model_fields["window"].default
        if self.at_steps and self.window != default:
            raise ValueError("window has no effect with at_steps: remove it")
        return self


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
    sampler: SamplerConfig | None = None
    """Which prompts are drawn next, depending on their rewards, instead of shuffled epochs."""

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
            if section.weight is not None and self.sampler is not None and self.sampler.name in ("task_mix", "stages"):
                raise ValueError(f"{key}.weight has no effect: the sampler {self.sampler.name} decides how rows are mixed")
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
