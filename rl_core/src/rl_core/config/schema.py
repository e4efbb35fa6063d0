"""The sections that every config has, as frozen models with their defaults. Independent of backends; does not import torch.

A plugin's section extends one of these: a policy backend's config model subclasses `PolicyConfig` and adds
`<backend>_cfg`, a generation backend's subclasses `GenerationConfig`, an environment's `EnvironmentConfig`,
a dataset's `DatasetConfig`, an algorithm's `AlgorithmConfig`, a loss's `LossConfig`, a logger's `LoggerConfig`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from rl_core.config.algorithm_section import AlgorithmConfig as AlgorithmConfig
from rl_core.config.data_sections import DataConfig as DataConfig
from rl_core.config.data_sections import DatasetConfig as DatasetConfig
from rl_core.config.data_sections import PromptConfig as PromptConfig
from rl_core.config.data_sections import SplitConfig as SplitConfig
from rl_core.config.durations import parse_duration
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
    """Base section of every loss (`loss_fn`)."""

    head: ClassVar[Literal["tokens", "scalar"]] = "tokens"
    """Head type of the model this loss applies to."""

    name: str | None = None
    """Loss component or dotted path; defaults to the loss of the algorithm."""

    @property
    def num_candidates(self) -> int:
        """K, the number of tokens that the loss compares at each position; 0 if it uses only the tokens of the row.

        A loss with K > 0 requires the capability `topk_logprobs` of policy and teacher.
        """
        return 0

    @property
    def sequence_level_key(self) -> str | None:
        """The key that makes the loss count rows instead of tokens; None if there is none.

        With such a loss, rollouts must not have several segments, because each would count as a rollout.
        """
        return None


class EnvironmentConfig(ComponentSection):
    """Base section of every environment (`env.<task>`)."""

    name: str | None = None
    """Environment component; defaults to the name of the task."""
    env_cls: str | None = None
    """Dotted path of an environment class, used instead of a component. All other keys are passed to it as its config."""
    num_workers: int = Field(default=1, ge=1)
    """Number of worker processes of this environment."""
    max_rollout_turns: int | None = Field(default=None, ge=1)
    """Maximum number of turns in a rollout of this task. Defaults to the algorithm's `max_rollout_turns`, or, if that is null,
    to the number of turns that the environment needs."""
    step_timeout_s: float = Field(default=600.0, gt=0.0)
    """Timeout of one call to a worker, in seconds. A worker that exceeds it is replaced, and the call is repeated up to
    `rollout.retries` times."""
    reward_weights: dict[str, float] = Field(default_factory=dict)
    """Weights of the named rewards in the reward of a row, 1 by default. A name that the environment does not return is
    refused."""
    max_concurrency: int = Field(default=1, ge=1)
    """Number of calls that a worker runs at the same time. With 1, rows that are ready at the same moment share a call, and
    later rows wait until a worker is free. Above 1, each row is a separate call in a thread, so a slow row does not delay the
    others; `step` must then be thread-safe."""
    tool_parser: str | None = None
    """Parser of the model's tool calls: `response_template` (the tokenizer's own), `hermes`, `llama3`, `mistral`, or the dotted
    path of a class. For environments with tools, null selects the one that fits tokenizer and chat template; for others, null
    disables parsing."""

    @property
    def turns_needed(self) -> int:
        """Maximum number of turns that the environment itself can use; 1 unless its section overrides this."""
        return 1

    @property
    def min_turns(self) -> int:
        """Number of turns without which the environment cannot give a reward; a config that allows fewer is refused.

        1 unless its section overrides this. A class used with `env_cls` has the class attribute `min_turns` instead.
        """
        return 1

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Names of rewards that the environment can return, but may not return in the first step."""
        return ()

    @model_validator(mode="after")
    def _one_implementation(self) -> EnvironmentConfig:
        if self.name is not None and self.env_cls is not None:
            raise ValueError("name and env_cls both select the environment: keep one of them")
        return self


class DeadlineConfig(Section):
    """Timeouts of remote calls, in seconds. When one expires, the error names the workers that did not answer."""

    start_s: float = Field(default=600.0, gt=0.0)
    """Timeout for starting workers and loading models."""
    generate_s: float = Field(default=1800.0, gt=0.0)
    """Timeout for one generation call."""
    train_s: float = Field(default=1800.0, gt=0.0)
    """Timeout for one training or scoring call."""
    refit_s: float = Field(default=600.0, gt=0.0)
    """Timeout for one refit."""
    checkpoint_s: float = Field(default=1800.0, gt=0.0)
    """Timeout for saving or loading a checkpoint."""
    environment_s: float = Field(default=1800.0, gt=0.0)
    """Timeout for one environment turn of the whole batch."""


class ClusterConfig(Section):
    """Nodes, workers and timeouts of a run (`cluster`)."""

    backend: Literal["ray", "in_process"] = "ray"
    """How workers run. `in_process` runs one worker of each kind in the driver process, without Ray, for debugging and fast
    tests."""
    num_nodes: int = Field(default=1, ge=1)
    """Number of nodes."""
    workers_per_node: int = Field(default=1, ge=1)
    """Number of policy ranks per node. On GPUs, each rank uses one GPU."""
    use_gpus: bool | None = None
    """Whether to use GPUs. By default, GPUs are used if there are any."""
    cpus_per_worker: int | None = Field(default=None, ge=1)
    """Number of CPUs (and threads) per rank. By default, the CPUs of the node are divided evenly among its ranks."""
    deadlines: DeadlineConfig = Field(default_factory=DeadlineConfig)
    """Timeouts of remote calls."""


class CheckpointingConfig(Section):
    """When checkpoints are saved and how many are kept (`checkpointing`)."""

    enabled: bool = True
    """Whether to save checkpoints. Without checkpoints, every start is a new run."""
    checkpoint_dir: str | None = None
    """Folder for the checkpoints of this run only; defaults to `checkpoints/` in the run folder."""
    save_period: int = Field(default=10, ge=1)
    """Number of steps between checkpoints. A checkpoint is also saved after the last step."""
    metric_name: str | None = None
    """Metric that ranks checkpoints, such as `validation/accuracy`."""
    higher_is_better: bool = True
    """Whether a higher value of `metric_name` is better."""
    keep_top_k: int | None = Field(default=None, ge=1)
    """Number of best checkpoints to keep, ranked by `metric_name`, which must then be set."""
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
    """How rollouts of several turns continue, and what happens if their environment fails (`rollout`)."""

    history: Literal["as_sampled", "template"] = "as_sampled"
    """What the model reads before its next turn. `as_sampled`: all earlier tokens as they were sampled, followed by the new
    messages. `template`: the conversation, rendered again by the chat template, which may change earlier turns, for example by
    dropping their reasoning. If it does, a new segment of the rollout starts, which is a separate training row."""
    retries: int = Field(default=2, ge=0)
    """How often an environment step is repeated after an exception, a timeout or the death of its worker. A row whose step
    fails in every attempt counts neither in the statistics of its group nor in the loss."""
    min_scored: int | None = Field(default=None, ge=1)
    """Number of scored rows that a group needs. A group with fewer is replaced by a group of the next prompt. By default, half
    of the group, at least 2."""
    max_failed_share: float = Field(default=0.1, ge=0.0, le=1.0)
    """Share of failed rows in the last 20 steps above which the run stops with the most frequent error."""

    def min_scored_of(self, group_size: int) -> int:
        """`min_scored`, or its default, for groups of this size."""
        return min(max(2, -(-group_size // 2)), group_size) if self.min_scored is None else self.min_scored


class ProfilingConfig(Section):
    """Steps to profile (`profiling`)."""

    steps: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    """Numbers of the steps whose `torch.profiler` trace is written to `profile/` of the run folder, such as `[3, 5]`. Requires
    `cluster.backend: in_process`. Profiled steps take longer."""


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
    """Number of rollouts written to rollouts.jsonl in each step; all by default."""
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
    def max_turns(self) -> dict[str, int]:
        """Maximum number of turns in a rollout, by task.

        It is set by the environment's section, else by the algorithm, else by what the environment needs.
        """
        asked = self.algorithm.runtime_needs.max_turns
        return {task: env.max_rollout_turns or asked or env.turns_needed for task, env in self.env.items()}

    @property
    def scoring_temperature(self) -> float:
        """Temperature at which policy and teacher score tokens, in training and in validation losses.

        An algorithm that samples scores tokens under the distribution that they are sampled from. Every other algorithm scores
        under the model's own distribution (1.0), regardless of the `policy.generation.temperature` used in validation.
        """
        return self.policy.scoring_temperature if self.algorithm.needs_generation else 1.0


class OpenPolicyConfig(PolicyConfig):
    """`policy` of a backend given by its path. Keys unknown to this model are passed on."""

    model_config = ConfigDict(extra="allow")


class OpenGenerationConfig(GenerationConfig):
    """`policy.generation` of a backend given by its path. Keys unknown to this model are passed on."""

    model_config = ConfigDict(extra="allow")


class OpenEnvironmentConfig(EnvironmentConfig):
    """`env.<task>` of an environment given by its path. Keys unknown to this model are passed on."""

    model_config = ConfigDict(extra="allow")


class OpenDatasetConfig(DatasetConfig):
    """Section of a dataset given by its path. Keys unknown to this model are passed on."""

    model_config = ConfigDict(extra="allow")


class OpenLossConfig(LossConfig):
    """`loss_fn` of a loss given by its path. Keys unknown to this model are passed on."""

    model_config = ConfigDict(extra="allow")


class OpenLoggerConfig(LoggerConfig):
    """Section of a logger given by its path. Keys unknown to this model are passed on."""

    model_config = ConfigDict(extra="allow")
