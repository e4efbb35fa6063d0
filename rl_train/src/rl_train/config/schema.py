"""The sections of the runtime, and the whole config, as frozen models with their defaults. Does not import torch.

An algorithm's section extends `AlgorithmConfig`, a loss's `LossConfig`, a logger's `LoggerConfig`. The sections of backends,
environments and datasets extend those of `rl_core.config.schema`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from rl_core.config.schema import ClusterConfig, DatasetConfig, EnvironmentConfig, GenerationConfig, PolicyConfig
from rl_core.config.section import ComponentSection, Section
from rl_train.config.algorithm_section import AlgorithmConfig as AlgorithmConfig
from rl_train.config.data_sections import DataConfig as DataConfig
from rl_train.config.data_sections import PromptConfig as PromptConfig
from rl_train.config.data_sections import SplitConfig as SplitConfig
from rl_train.config.durations import parse_duration

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
    data: DataConfig
    env: dict[str, EnvironmentConfig] = Field(default_factory=dict)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    profiling: ProfilingConfig = Field(default_factory=ProfilingConfig)
    checkpointing: CheckpointingConfig = Field(default_factory=CheckpointingConfig)
    logger: LoggingConfig = Field(default_factory=LoggingConfig)

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
