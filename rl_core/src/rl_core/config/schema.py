"""The sections that every config has, as frozen models with their defaults; knows no backend and imports no torch.

A plugin's section extends one of these: a policy backend's config model subclasses `PolicyConfig` and adds
`<backend>_cfg`, a generation backend's subclasses `GenerationConfig`, an environment's `EnvironmentConfig`,
a dataset's `DatasetConfig`, an algorithm's `AlgorithmConfig`, a loss's `LossConfig`, a logger's `LoggerConfig`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from rl_core.config.algorithm_section import AlgorithmConfig as AlgorithmConfig
from rl_core.config.durations import parse_duration
from rl_core.config.paths import INPUT_PATH, NAME_OR_PATH
from rl_core.config.policy_sections import (
    DynamicBatchingConfig as DynamicBatchingConfig,
)
from rl_core.config.policy_sections import (
    GenerationConfig as GenerationConfig,
)
from rl_core.config.policy_sections import (
    OptimizerConfig as OptimizerConfig,
)
from rl_core.config.policy_sections import (
    PolicyConfig as PolicyConfig,
)
from rl_core.config.policy_sections import (
    SchedulerConfig as SchedulerConfig,
)
from rl_core.config.policy_sections import (
    SequencePackingConfig as SequencePackingConfig,
)
from rl_core.config.policy_sections import (
    TokenizerConfig as TokenizerConfig,
)
from rl_core.config.section import ComponentSection
from rl_core.config.section import Section as Section


class LossConfig(ComponentSection):
    """What every loss's section has."""

    head: ClassVar[Literal["tokens", "scalar"]] = "tokens"
    """What the model ends in whose loss it is."""

    name: str | None = None
    """The loss component or a dotted path; the algorithm's own by default."""

    @property
    def num_candidates(self) -> int:
        """K, how many tokens it compares at each position; 0 where it reads the row's own alone.

        For others policy and teacher need the capability `topk_logprobs`.
        """
        return 0


class EnvironmentConfig(ComponentSection):
    """What every environment's section has (`env.<task>`)."""

    name: str | None = None
    """The environment component; the task's own name by default."""
    env_cls: str | None = None
    """Dotted path of an environment class, in place of a component; all other keys are then its config."""
    num_workers: int = Field(default=1, ge=1)
    """Processes that score."""
    max_rollout_turns: int | None = Field(default=None, ge=1)
    """Most turns of a rollout of this task. By default the algorithm's `max_rollout_turns`, and where that is null as many as
    the environment needs."""
    step_timeout_s: float = Field(default=600.0, gt=0.0)
    """A worker that takes longer over one call is replaced and the call made again."""

    @property
    def turns_needed(self) -> int:
        """Most turns that the environment itself has use for; 1 where its section does not say more."""
        return 1

    @model_validator(mode="after")
    def _one_implementation(self) -> EnvironmentConfig:
        if self.name is not None and self.env_cls is not None:
            raise ValueError("name and env_cls both say which environment it is: keep one of them")
        return self


class DatasetConfig(ComponentSection):
    """What every dataset's section has (`data.train`, `data.validation`)."""

    record_kind: ClassVar[Literal["conversations", "pairs"] | None] = None
    """Whether records are conversations (prompts included) or pairs of a chosen and a rejected answer; None if that depends on
    the data."""

    dataset_name: str
    """The dataset component, or a dotted path."""
    task_name: str | None = None
    """Which environment answers its records, where the dataset does not say."""
    processor: str | None = None
    """Dotted path of a function from a record to a tokenised row, in place of the core's; `docs/data.md` has its face."""
    weight: float | None = Field(default=None, gt=0.0)
    """In `data.mix`: its share of the training rows, relative to the other members; 1 by default."""


class PromptConfig(Section):
    """How a record becomes a message, for every dataset that does not say so itself."""

    prompt_config: Annotated[str | None, NAME_OR_PATH] = None
    """A packaged template such as `generic/math`, or the path of one."""
    system_prompt: str | None = None
    """The system message; the template's own by default."""
    examples_type: str | None = None
    """Few-shot examples by name: not there, so null alone is allowed. Write examples into a template of your own."""

    @model_validator(mode="after")
    def _no_examples(self) -> PromptConfig:
        if self.examples_type is not None:
            raise ValueError(
                f"examples_type is {self.examples_type!r}, and templates have no lists of examples: write them into a template "
                "of your own and name its path in prompt_config"
            )
        return self


class SplitConfig(Section):
    """Rows of the training data that are held out of it for validation."""

    validation: float = Field(gt=0.0, lt=1.0)
    """The share that is held out: each row with this probability, by what it asks and not by where it stands."""
    seed: int = 0
    """Another seed holds out others."""


class DataConfig(Section):
    """What is asked (`data`)."""

    train: DatasetConfig | None = None
    """The training data."""
    mix: dict[str, DatasetConfig] = Field(default_factory=dict)
    """Training data of several datasets, by a name of your own, in place of `train`; each has a `weight`."""
    split: SplitConfig | None = None
    """Validation data held out of the training data, in place of `validation`."""
    validation: DatasetConfig | None = None
    """The validation data."""
    train_data_path: Annotated[str | None, INPUT_PATH] = None
    """Short for `train: {dataset_name: jsonl, path: ...}`."""
    val_data_path: Annotated[str | None, INPUT_PATH] = None
    """Short for `validation: {dataset_name: jsonl, path: ...}`."""
    prompt: PromptConfig | None = None
    """How a record becomes a message."""
    max_input_seq_length: int | None = Field(default=None, ge=1)
    """Most tokens of a prompt; the policy's `max_total_sequence_length` less one by default."""
    on_long_prompt: Literal["error", "drop"] = "error"
    """What happens to a longer one; dropped ones are counted."""
    check_rows: int = Field(default=2000, ge=0)
    """Rows of the training data and of the validation data that are tokenized before the run starts, in the order in which they
    are drawn. A row among them that is too long, or that the chat template cannot render, ends the run at once. 0 checks the
    first row only."""
    shuffle: bool = True
    """See the training data in another order each epoch."""

    @model_validator(mode="after")
    def _one_source_each(self) -> DataConfig:
        if self.train is not None and self.train_data_path is not None:
            raise ValueError("train and train_data_path both name the training data: keep one of them")
        if self.mix and (self.train is not None or self.train_data_path is not None):
            raise ValueError("mix and train both name the training data: keep one of them")
        if self.validation is not None and self.val_data_path is not None:
            raise ValueError("validation and val_data_path both name the validation data: keep one of them")
        if self.split is not None and (self.validation is not None or self.val_data_path is not None):
            raise ValueError("split and validation both name the validation data: keep one of them")
        for key, section in (("train", self.train), ("validation", self.validation)):
            if section is not None and section.weight is not None:
                raise ValueError(f"{key}.weight weighs nothing: weights are for the members of mix")
        return self

    @model_validator(mode="after")
    def _prompts_are_filled_by_somebody(self) -> DataConfig:
        for name, section in self.sections().items():
            for asked, key in (("prompt_config", "prompt"), ("system_prompt", "system_prompt")):
                if self.prompt is None or getattr(self.prompt, asked) is None:
                    continue
                if key not in type(section).model_fields or (key == "prompt" and getattr(section, "record_fn", None)):
                    raise ValueError(
                        f"prompt.{asked} is for every dataset, and {name} ({section.dataset_name}) fills no template: write "
                        f"`{key}` into the sections of those that do"
                    )
        return self

    @property
    def has_training_data(self) -> bool:
        """Whether anything names training data."""
        return self.train is not None or bool(self.mix)

    @property
    def has_validation_data(self) -> bool:
        """Whether anything names validation data."""
        return self.validation is not None or (self.split is not None and self.has_training_data)

    def sections(self) -> dict[str, DatasetConfig]:
        """Every dataset, by its key within `data`."""
        own = {"train": self.train, "validation": self.validation}
        named = {key: section for key, section in own.items() if section is not None}
        return {**named, **{f"mix.{name}": section for name, section in self.mix.items()}}


class DeadlineConfig(Section):
    """How long the driver waits before it says who did not answer, in seconds."""

    start_s: float = Field(default=600.0, gt=0.0)
    """Starting workers and loading models."""
    generate_s: float = Field(default=1800.0, gt=0.0)
    """One generation call."""
    train_s: float = Field(default=1800.0, gt=0.0)
    """One training or scoring call."""
    refit_s: float = Field(default=600.0, gt=0.0)
    """One refit."""
    checkpoint_s: float = Field(default=1800.0, gt=0.0)
    """Saving or loading a checkpoint."""
    environment_s: float = Field(default=1800.0, gt=0.0)
    """One environment turn of the whole batch."""


class ClusterConfig(Section):
    """Where it runs (`cluster`)."""

    backend: Literal["ray", "in_process"] = "ray"
    """`in_process` runs one worker of each kind in the driver, without Ray: for debuggers and fast tests."""
    num_nodes: int = Field(default=1, ge=1)
    """Nodes."""
    workers_per_node: int = Field(default=1, ge=1)
    """Policy ranks on each node; with GPUs, one GPU each."""
    use_gpus: bool | None = None
    """GPUs where there are any by default."""
    cpus_per_worker: int | None = Field(default=None, ge=1)
    """CPUs (and threads) of one rank; the node's, shared evenly, by default."""
    deadlines: DeadlineConfig = Field(default_factory=DeadlineConfig)
    """How long to wait before saying who did not answer."""


class CheckpointingConfig(Section):
    """What is kept on disk (`checkpointing`)."""

    enabled: bool = True
    """Write checkpoints. Without them, every start is a new run."""
    checkpoint_dir: str | None = None
    """Folder of the checkpoints, for this run alone; `checkpoints/` in the run folder by default."""
    save_period: int = Field(default=10, ge=1)
    """After every so many steps, and after the last."""
    metric_name: str | None = None
    """The metric that ranks checkpoints, such as `validation/accuracy`."""
    higher_is_better: bool = True
    """How it ranks them."""
    keep_top_k: int | None = Field(default=None, ge=1)
    """Keep the so many best by that metric; needs `metric_name`."""
    keep_latest_k: int = Field(default=2, ge=1)
    """Keep the so many newest, whatever their metric."""
    save_optimizer: bool = True
    """Keep what training goes on from; without it a checkpoint is weights alone and cannot be resumed."""
    max_time: float | str | None = None
    """Longest time from the start of the command, as seconds or `HH:MM:SS` or `D-HH:MM:SS`: the run ends with a checkpoint
    after the last step that fits, with exit code 124, and the same command continues it. No limit by default."""
    stop_grace_s: float | None = Field(default=None, gt=0.0)
    """Seconds after SIGTERM, SIGHUP or Ctrl-C within which the step under way and its checkpoint must end; then the run ends
    without that checkpoint. No limit by default."""

    @field_validator("max_time")
    @classmethod
    def _is_a_duration(cls, value: float | str | None) -> float | str | None:
        if value is not None:
            parse_duration(value)
        return value

    @model_validator(mode="after")
    def _ranking_needs_a_metric(self) -> CheckpointingConfig:
        if self.keep_top_k is not None and self.metric_name is None:
            raise ValueError("keep_top_k ranks checkpoints by metric_name: set it, for example validation/accuracy")
        return self


class LoggerConfig(ComponentSection):
    """What every logger's section has (`logger.<name>`)."""

    enabled: bool = True
    """Use it."""


class LoggingConfig(Section):
    """Where metrics and rollouts go (`logger`); metrics.jsonl and the console are always written."""

    log_dir: str = "runs"
    """Parent of run folders."""
    run_name: str | None = None
    """Name of the run folder; the config file's by default."""
    num_rollouts_logged: int | None = Field(default=None, ge=0)
    """Rollouts written to rollouts.jsonl each step; all by default."""
    loggers: dict[str, LoggerConfig] = Field(default_factory=dict)
    """Further loggers, by component name."""


class RunConfig(Section):
    """A whole run, as the sections' own models."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    algorithm_name: str
    """The component whose section the file has."""
    algorithm: AlgorithmConfig
    loss_fn: LossConfig
    policy: PolicyConfig
    value: PolicyConfig | None = None
    """The value model, as a policy's section; its head is scalar."""
    teacher: PolicyConfig | None = None
    """The model that is learnt from, as a policy's section; it is never trained."""
    data: DataConfig
    env: dict[str, EnvironmentConfig] = Field(default_factory=dict)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    checkpointing: CheckpointingConfig = Field(default_factory=CheckpointingConfig)
    logger: LoggingConfig = Field(default_factory=LoggingConfig)

    @property
    def max_turns(self) -> dict[str, int]:
        """Most turns of a rollout, by task: what its environment's section says, else the algorithm, else what it needs."""
        asked = self.algorithm.runtime_needs.max_turns
        return {task: env.max_rollout_turns or asked or env.turns_needed for task, env in self.env.items()}

    @property
    def scoring_temperature(self) -> float:
        """Temperature at which policy and teacher score tokens, in training and in validation losses.

        An algorithm that samples scores tokens under the distribution that they are drawn from. Every other algorithm scores
        under the model's own distribution (1.0), whatever `policy.generation.temperature` its validation samples at.
        """
        return self.policy.scoring_temperature if self.algorithm.needs_generation else 1.0


class OpenPolicyConfig(PolicyConfig):
    """`policy` of a backend given by its path: keys that this model does not know are passed on."""

    model_config = ConfigDict(extra="allow")


class OpenGenerationConfig(GenerationConfig):
    """`policy.generation` of a backend given by its path: keys that this model does not know are passed on."""

    model_config = ConfigDict(extra="allow")


class OpenEnvironmentConfig(EnvironmentConfig):
    """`env.<task>` of an environment given by its path: keys that this model does not know are passed on."""

    model_config = ConfigDict(extra="allow")


class OpenDatasetConfig(DatasetConfig):
    """The section of a dataset given by its path: keys that this model does not know are passed on."""

    model_config = ConfigDict(extra="allow")


class OpenLossConfig(LossConfig):
    """`loss_fn` of a loss given by its path: keys that this model does not know are passed on."""

    model_config = ConfigDict(extra="allow")


class OpenLoggerConfig(LoggerConfig):
    """The section of a logger given by its path: keys that this model does not know are passed on."""

    model_config = ConfigDict(extra="allow")
