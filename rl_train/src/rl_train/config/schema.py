"""The sections of the runtime, and the whole config, as frozen models with their defaults. Does not import torch.

An algorithm's section extends `AlgorithmConfig`, a loss's `LossConfig`, a logger's `LoggerConfig`. The sections of backends,
environments and datasets extend those of `rl_core.config.schema`. `BASES` has the models of all kinds of components.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rl_core.config.diagnostics import KeyPath, Node
from rl_core.config.introspection import Model
from rl_core.config.schema import ClusterConfig, DatasetConfig, EnvironmentConfig, GenerationConfig, PolicyConfig, RecordKind
from rl_core.config.section import ComponentSection, Section
from rl_core.errors import InvalidComponentError
from rl_core.plugins.component import Component, Kind, is_path
from rl_train.config.algorithm import RuntimeNeeds
from rl_train.config.data_sections import DataConfig as DataConfig
from rl_train.config.data_sections import PromptConfig as PromptConfig
from rl_train.config.data_sections import SplitConfig as SplitConfig


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """How an algorithm trains a model, according to its section."""

    steps: int
    """Number of steps in which the model is trained."""
    rows: int
    """Number of rows per step; the maximum if it varies."""
    passes: int = 1
    """Number of passes over the rows of a step."""
    rows_per_unit: int = 1
    """Number of adjacent rows that must stay together: two for a pair."""
    is_exact: bool = True
    """Whether every step has exactly `rows` rows."""


class AlgorithmConfig(Section):
    """Base section of every algorithm."""

    default_loss: ClassVar[str | None] = None
    """Name of the loss used if `loss_fn` names none. If this is None, `loss_fn.name` is required."""
    head: ClassVar[Literal["tokens", "scalar"]] = "tokens"
    """Head type of the model that the algorithm trains; the default of `policy.head`."""
    allows_filtered_sampling: ClassVar[bool] = False
    """Whether the algorithm may train on samples drawn with top-p or top-k, with log-probabilities of the filtered
    distribution."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Capabilities that the policy or the engine must have, such as those of the algorithm's own plugin (`acme:name`)."""
    records_key: ClassVar[str | None] = None
    """Key of the number of records per step, which a Python trainer lowers to the size of the dataset unless it is set."""

    max_num_steps: int = Field(default=100, ge=1)
    """Total number of steps, including the steps before a resume."""
    max_num_epochs: int | None = Field(default=None, ge=1)
    """Maximum number of passes over the training data. The run ends after them if that comes before `max_num_steps`."""
    seed: int = 42
    """Random seed for data order, sampling and initialization."""
    val_period: int = Field(default=0, ge=0)
    """Number of steps between validations; 0 disables periodic validation."""
    val_at_start: bool = False
    """Whether to validate before the first step."""
    val_at_end: bool = False
    """Whether to validate after the last step."""
    val_batch_size: int = Field(default=256, ge=1)
    """Number of rows per validation batch."""
    max_val_samples: int | None = Field(default=None, ge=1)
    """Number of validation records to use, from the start of the data; all by default."""

    def is_on_policy(self, run: RunConfig) -> bool:
        """Whether a step trains only the weights that it scored, with one optimizer step, so that the ratio is 1."""
        return False

    def for_records(self, count: int) -> Self:
        """This section with at most `count` records per step, unless `records_key` is set."""
        key = self.records_key
        if key is None or key in self.model_fields_set or getattr(self, key) <= count:
            return self
        return self.model_copy(update={key: count})

    @property
    def runtime_needs(self) -> RuntimeNeeds:
        """What the algorithm needs from the runtime. Every algorithm must implement it.

        Raises:
            NotImplementedError: The section's model does not implement it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must implement the property `runtime_needs`, which declares how many prompts or records a "
            "step takes. See docs/custom_losses_and_algorithms.md"
        )

    @model_validator(mode="after")
    def _declares_its_needs(self) -> AlgorithmConfig:
        # Evaluated here so that no worker is started for an algorithm with a missing or invalid declaration.
        _ = self.runtime_needs
        return self

    @property
    def needs_generation(self) -> bool:
        """Whether the algorithm trains on rollouts, so that the config must have `policy.generation`."""
        return self.runtime_needs.rollouts is not None

    @property
    def needs_rewards(self) -> bool:
        """Whether its rollouts must be scored, so that the config must have a section `env`."""
        rollouts = self.runtime_needs.rollouts
        return rollouts is None or rollouts.rewarded

    @property
    def needs_preferences(self) -> bool:
        """Whether its records are pairs of a chosen and a rejected answer."""
        return self.record_kind == "pairs"

    @property
    def record_kind(self) -> RecordKind:
        """What a record of its data is."""
        records = self.runtime_needs.records
        return "conversations" if records is None else records.kind

    def conflicts(self, run: Any) -> Iterator[tuple[KeyPath, str]]:
        """Yield each key of another section that the algorithm does not support, with the reason.

        `run` is the whole config, a `rl_train.config.schema.RunConfig`.
        """
        yield from ()

    def training_plan(self, model: str, run: Any) -> TrainingPlan | None:
        """How the algorithm trains the model of a section (`policy`, `value`), for schedules that count optimizer steps.

        `run` is the whole config. None, the default, means unknown: a schedule must then set its own length.
        """
        return None


MAX_AGENT_TURNS = 100
"""Maximum number of turns in a rollout of an agent, unless the config sets another."""


class LossConfig(ComponentSection):
    """Base section of every loss (`loss_fn`)."""

    head: ClassVar[Literal["tokens", "scalar"]] = "tokens"
    """Head type of the model this loss applies to."""

    name: str | None = None
    """Name of a registered loss, or the dotted path of its class; defaults to the loss of the algorithm."""

    @property
    def num_candidates(self) -> int:
        """K, the number of tokens that the loss compares at each position; 0 if it uses only the tokens of the row.

        A loss with K > 0 requires the capability `topk_logprobs` of policy and teacher.
        """
        return 0

    @property
    def needs_reference(self) -> bool:
        """Whether the loss, or a KL penalty in the reward, compares the policy with a reference policy."""
        return False

    @property
    def corrects_for_older_weights(self) -> bool:
        """Whether the loss may train on tokens that were sampled with older weights than those before the step."""
        return False

    @property
    def sequence_level_key(self) -> str | None:
        """The key that makes the loss count rows instead of tokens; None if there is none.

        With such a loss, rollouts must not have several segments, because each would count as a rollout.
        """
        return None


class CheckpointingConfig(Section):
    """When checkpoints are saved and how many are kept (`checkpointing`)."""

    enabled: bool = True
    """Whether to save checkpoints. Without checkpoints, every start is a new run."""
    checkpoint_dir: str | None = None
    """Folder for the checkpoints of this run only; defaults to `checkpoints/` in the run folder."""
    save_period: int = Field(default=10, ge=1)
    """Number of steps between checkpoints. A checkpoint is also saved after the last step."""
    metric_name: str | None = None
    """Metric that ranks checkpoints, such as `validation/accuracy`; docs/metrics.md lists all."""
    higher_is_better: bool = True
    """Whether a higher value of `metric_name` is better."""
    keep_top_k: int | None = Field(default=None, ge=1)
    """Number of best checkpoints to keep, ranked by `metric_name`, which must then be set. All are kept until one has the
    metric."""
    keep_latest_k: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep, regardless of their metric."""
    save_optimizer: bool = True
    """Whether to save the state that training resumes from. Without it, a checkpoint contains only weights and cannot be
    resumed."""
    max_time: float | str | None = None
    """Time limit from the start of the command, in seconds or as `HH:MM:SS` or `D-HH:MM:SS`. The run saves a checkpoint after
    the last step that fits and exits with code 124; the same command continues it. No limit by default."""
    stop_grace_s: float | None = Field(default=None, gt=0.0)
    """Seconds that the current step and its checkpoint may take after SIGTERM, SIGHUP or Ctrl-C. If they take longer, the run
    ends without that checkpoint. No limit by default."""

    @field_validator("max_time")
    @classmethod
    def _is_a_duration(cls, value: float | str | None) -> float | str | None:
        if value is not None:
            parse_duration(value)
        return value

    @model_validator(mode="after")
    def _ranking_needs_a_metric(self) -> CheckpointingConfig:
        if self.keep_top_k is not None and self.metric_name is None:
            raise ValueError("keep_top_k requires metric_name: set it, for example to validation/accuracy")
        return self


class RolloutConfig(Section):
    """Prompts of later turns in multi-turn rollouts, and handling of environment failures (`rollout`)."""

    history: Literal["as_sampled", "template"] = "as_sampled"
    """Prompt of every turn after the first. `as_sampled`: all earlier tokens as they were sampled, then the new messages.
    `template`: the whole conversation, rendered again by the chat template, which may change earlier turns, for example drop
    their reasoning. If it does, the rollout continues in a new segment, which is a separate training row."""
    retries: int = Field(default=2, ge=0)
    """Maximum number of retries of an environment step after an exception, a timeout or the exit of its worker. A row whose
    step fails in every attempt is excluded from the statistics of its group and from the loss."""
    min_scored: int | None = Field(default=None, ge=1)
    """Minimum number of scored rows in a group. A group with fewer is replaced by a group of the next prompt. By default, half
    of the group, at least 2."""
    max_failed_share: float = Field(default=0.1, ge=0.0, le=1.0)
    """Maximum fraction of failed rows over the last 20 steps. If it is exceeded, the run stops and reports the most frequent
    error."""

    max_staleness: int = Field(default=0, ge=0)
    """Maximum number of steps between the weights that sample a token and the step that trains it. 0: rollouts are sampled when
    a step needs them, and training waits. Above 0, rollouts are also sampled during training."""
    ahead: int | None = Field(default=None, ge=0)
    """Number of batches whose rollouts begin before the batch in training is done; at most `max_staleness`. By default 1, or 0
    without staleness, or `max_staleness` with `order: exact`. More keep the engine busier, with older rollouts."""
    order: Literal["ready", "exact"] = "ready"
    """Which rollouts make up a batch if `max_staleness` is k. `ready`: those that ended first, among them all that could
    otherwise exceed the bound. `exact`: the next prompts of the data, and batch s is sampled with the weights of step
    max(1, s - k). Refits and checkpoints then wait for rollouts in progress, so a run can be repeated exactly, but overlaps
    less."""
    timeout_s: float | None = Field(default=None, gt=0.0)
    """Timeout of a whole rollout in seconds. A rollout that exceeds it starts again, up to `retries` times, and is then
    excluded like one whose environment failed. No timeout by default. It removes slow rollouts, so the remaining ones are
    biased."""

    @model_validator(mode="after")
    def _ahead_is_within_the_bound(self) -> RolloutConfig:
        if self.order == "exact" and self.max_staleness == 0:
            raise ValueError("order: exact has no effect with max_staleness 0, where every run is exact: remove it")
        if self.order == "exact" and self.ahead not in (None, self.max_staleness):
            raise ValueError(
                f"with order: exact, each batch begins max_staleness ({self.max_staleness}) steps early, but ahead is "
                f"{self.ahead}: remove ahead"
            )
        if self.ahead is not None and self.ahead > self.max_staleness:
            raise ValueError(
                f"ahead is {self.ahead}, but rollouts of a batch that begins {self.ahead} steps early can be {self.ahead} "
                f"steps old, and max_staleness is {self.max_staleness}: lower ahead or raise max_staleness"
            )
        return self

    @property
    def batches_ahead(self) -> int:
        """`ahead`, or its default."""
        default = self.max_staleness if self.order == "exact" else min(1, self.max_staleness)
        return default if self.ahead is None else self.ahead

    def min_scored_of(self, group_size: int) -> int:
        """`min_scored`, or its default, for groups of this size."""
        return min(max(2, -(-group_size // 2)), group_size) if self.min_scored is None else self.min_scored


class ProfilingConfig(Section):
    """Steps to profile (`profiling`)."""

    steps: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    """Numbers of the steps to profile with `torch.profiler`, such as `[3, 5]`; traces are written to `profile/` of the run
    folder. Requires `cluster.backend: in_process`. Profiled steps take longer."""
    memory: bool = False
    """Whether to also record each allocation on the GPU in these steps, with its Python stack. The snapshot is written to
    `profile/memory_NNNNNN.pickle`, also if the step fails; open it at https://pytorch.org/memory_viz. Requires a GPU."""
    peak_tflops: float | None = Field(default=None, gt=0.0)
    """Peak speed of one device in TFLOP/s, which `mfu` in the metrics is relative to. By default, the vendor's figure for dense
    bfloat16, if the GPU is a known one and the policy computes in bfloat16; otherwise there is no `mfu`."""


class StopConfig(Section):
    """When a run stops before its last step because a metric no longer improves (`stop`)."""

    metric_name: str | None = None
    """Metric that must improve, such as `validation/accuracy`; docs/metrics.md lists all. By default, no run stops early."""
    mode: Literal["max", "min"] | None = None
    """Whether a higher (`max`) or a lower (`min`) value is better. Required with `metric_name`."""
    patience: int = Field(default=3, ge=1)
    """Number of successive values without an improvement after which the run stops; a validation gives one value."""
    min_delta: float = Field(default=0.0, ge=0.0)
    """Minimum difference from the best value so far that counts as an improvement."""

    @model_validator(mode="after")
    def _metric_has_a_direction(self) -> StopConfig:
        if self.metric_name is not None and self.mode is None:
            raise ValueError("metric_name requires mode: set it to max if a higher value is better, otherwise to min")
        if self.metric_name is None and self.model_fields_set - {"metric_name"} and self != type(self)():
            raise ValueError("has no effect without metric_name: set it, for example to validation/accuracy")
        return self


class CallbackConfig(Section):
    """A callback, which follows the run and may control it (`callbacks.<name>`)."""

    name: str
    """Import path of a function with the arguments of `rlcore_step_finished`, or of a class whose methods implement run event
    hooks; see docs/callbacks.md."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""


class LoggerConfig(ComponentSection):
    """Base section of every logger (`logger.loggers.<name>`)."""

    enabled: bool = True
    """Whether to use this logger."""


class LoggingConfig(Section):
    """Where metrics and rollouts are logged (`logger`). metrics.jsonl and the console output are always written."""

    log_dir: str = "runs"
    """Parent folder of run folders."""
    run_name: str | None = None
    """Name of the run folder; defaults to the name of the config file."""
    num_rollouts_logged: int | None = Field(default=None, ge=0)
    """Maximum number of rollouts that loggers write in each step, to rollouts/step_NNNNNN.jsonl for example; all by default."""
    loggers: dict[str, LoggerConfig] = Field(default_factory=dict)
    """Additional loggers, by component name."""


class RunConfig(Section):
    """A whole run, with each section as its own model."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    algorithm_name: str
    """Name of the algorithm whose section the config has."""
    algorithm: AlgorithmConfig
    loss_fn: LossConfig
    policy: PolicyConfig
    value: PolicyConfig | None = None
    """The value model, configured like the policy; its head is scalar."""
    teacher: PolicyConfig | None = None
    """The teacher model, configured like the policy; it is never trained."""
    teachers: dict[str, PolicyConfig] = Field(default_factory=dict)
    """Instead of `teacher`: the teacher of the rows of each task, by its name. Equal sections share a model."""
    data: DataConfig
    env: dict[str, EnvironmentConfig] = Field(default_factory=dict)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    profiling: ProfilingConfig = Field(default_factory=ProfilingConfig)
    checkpointing: CheckpointingConfig = Field(default_factory=CheckpointingConfig)
    logger: LoggingConfig = Field(default_factory=LoggingConfig)
    stop: StopConfig = Field(default_factory=StopConfig)
    callbacks: dict[str, CallbackConfig] = Field(default_factory=dict)

    @property
    def engine_has_own_resources(self) -> bool:
        """Whether the engine has its own nodes, CPUs and GPUs, instead of those of the policy."""
        return self.policy.generation is not None and self.policy.generation.resources is not None

    @property
    def max_turns(self) -> dict[str, int]:
        """Maximum number of turns in a rollout, by task.

        It is set by the environment's section, else by the algorithm, else by what the environment needs, or by
        `MAX_AGENT_TURNS` for a task with an agent.
        """
        asked = self.algorithm.runtime_needs.max_turns
        return {
            task: env.max_rollout_turns or asked or (env.turns_needed if env.agent is None else MAX_AGENT_TURNS)
            for task, env in self.env.items()
        }

    @property
    def scoring_temperature(self) -> float:
        """Temperature at which policy and teacher score tokens, in training and in validation losses.

        An algorithm that samples scores tokens under the distribution that they are sampled from. Every other algorithm scores
        under the model's own distribution (1.0), regardless of the `policy.generation.temperature` used in validation.
        """
        return self.policy.scoring_temperature if self.algorithm.needs_generation else 1.0

    @property
    def needs_sampled_sets(self) -> bool:
        """Whether log-probabilities are those among the tokens that `top_p`, `top_k` and `min_p` kept in rollouts."""
        algorithm, engine = self.algorithm, self.policy.generation
        is_filtered = engine is not None and bool(engine.sampling_filters())
        return is_filtered and algorithm.needs_generation and not algorithm.allows_filtered_sampling


class _OpenSection(Section):
    """A section of a component given by its path, whose other keys are passed on."""

    model_config = ConfigDict(extra="allow")


class OpenPolicyConfig(PolicyConfig, _OpenSection):
    """`policy` of a backend given by its path. Keys unknown to this model are passed on."""


class OpenGenerationConfig(GenerationConfig, _OpenSection):
    """`policy.generation` of a backend given by its path. Keys unknown to this model are passed on."""


class OpenEnvironmentConfig(EnvironmentConfig, _OpenSection):
    """`env.<task>` of an environment given by its path. Keys unknown to this model are passed on."""


class OpenDatasetConfig(DatasetConfig, _OpenSection):
    """Section of a dataset given by its path. Keys unknown to this model are passed on."""


class OpenLossConfig(LossConfig, _OpenSection):
    """`loss_fn` of a loss given by its path. Keys unknown to this model are passed on."""


class OpenLoggerConfig(LoggerConfig, _OpenSection):
    """Section of a logger given by its path. Keys unknown to this model are passed on."""


BASES: dict[Kind, tuple[Model, Model]] = {
    Kind.ALGORITHM: (AlgorithmConfig, AlgorithmConfig),
    Kind.LOSS: (LossConfig, OpenLossConfig),
    Kind.POLICY: (PolicyConfig, OpenPolicyConfig),
    Kind.GENERATION: (GenerationConfig, OpenGenerationConfig),
    Kind.ENVIRONMENT: (EnvironmentConfig, OpenEnvironmentConfig),
    Kind.DATASET: (DatasetConfig, OpenDatasetConfig),
    Kind.LOGGER: (LoggerConfig, OpenLoggerConfig),
}
"""The base class of the config model of each kind, and the model of a component given by its path."""


def model_at(written: Node, path: KeyPath) -> BaseModel | None:
    """The model that is given as a section; None if its values are written one by one, or not at all."""
    node = written.at(path)
    return node.value if node is not None and isinstance(node.value, BaseModel) else None


def section_of(component: Component, kind: Kind) -> Model:
    """The model of a component's section.

    Raises:
        PluginError: The model cannot be imported, or does not extend the base model of its kind.
    """
    base, opened = BASES[kind]
    model = component.load_config()
    if model is None:
        return opened if is_path(component.name) else base
    if not issubclass(model, base):
        raise InvalidComponentError(
            f"The config model {component.config} of the {kind.label} {component.name!r} is not a subclass of "
            f"{base.__module__}.{base.__name__}. This is a bug in the package that registers it."
        )
    return model


_DURATION = re.compile(r"(?:(?P<days>\d+)-)?(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+(?:\.\d+)?)")


def parse_duration(value: float | str) -> float:
    """Seconds of a duration: a number of seconds, or `MM:SS`, `HH:MM:SS` or `D-HH:MM:SS` as in Slurm.

    Raises:
        ValueError: The value is not a duration or is not positive.
    """
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if isinstance(value, str) and match is None:
        raise ValueError(f"{value!r} is not a duration: give seconds, or MM:SS, HH:MM:SS or D-HH:MM:SS, such as 03:50:00")
    if match is None:
        seconds = float(value)
    else:
        days, hours, minutes = (int(match[name] or 0) for name in ("days", "hours", "minutes"))
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + float(match["seconds"])
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{value!r} is not a duration: it must be positive")
    return seconds


def uses_canary(generation: GenerationConfig) -> bool:
    """Whether the canary is enabled and possible: a policy does not score tokens with an engine's changes of logits."""
    return generation.refit_canary and not generation.logit_changes()
