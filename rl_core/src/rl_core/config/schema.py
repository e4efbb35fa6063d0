"""The sections that backends, environments and tools extend or receive. Does not import torch.

A policy backend's config model subclasses `PolicyConfig` and adds `<backend>_cfg`, a generation backend's subclasses
`GenerationConfig`, an environment's `EnvironmentConfig`, and a dataset's `DatasetConfig`. All other sections belong to
the runtime.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Protocol

from pydantic import Field, model_validator

from rl_core.config.policy_sections import DynamicBatchingConfig as DynamicBatchingConfig
from rl_core.config.policy_sections import GenerationConfig as GenerationConfig
from rl_core.config.policy_sections import OptimizerConfig as OptimizerConfig
from rl_core.config.policy_sections import PolicyConfig as PolicyConfig
from rl_core.config.policy_sections import SchedulerConfig as SchedulerConfig
from rl_core.config.policy_sections import SequencePackingConfig as SequencePackingConfig
from rl_core.config.policy_sections import TokenizerConfig as TokenizerConfig
from rl_core.config.section import ClusterConfig as ClusterConfig
from rl_core.config.section import ComponentSection
from rl_core.config.section import DeadlineConfig as DeadlineConfig
from rl_core.config.section import Section as Section

RecordKind = Literal["conversations", "pairs", "unpaired"]


class DatasetConfig(ComponentSection):
    """Base section of every dataset (`data.train`, `data.validation`)."""

    record_kind: ClassVar[RecordKind | None] = None
    """What a record is: a conversation or a prompt, a pair of a chosen and a rejected answer, or an answer with a label
    (`unpaired`); None if it depends on the data."""

    dataset_name: str
    """Name of a registered dataset, or the dotted path of its class."""
    task_name: str | None = None
    """Name of the environment (task) that scores the records. Used for records whose dataset does not set a task."""
    processor: str | None = None
    """Dotted path of a function that converts a record to a tokenized row, replacing the built-in one; see `docs/data.md` for
    its signature."""
    weight: float | None = Field(default=None, gt=0.0)
    """In `data.mix`: sampling weight of this dataset, relative to the other datasets; 1 by default."""
    val_period: int | None = Field(default=None, ge=1)
    """In `data.validation_sets`: number of steps between validations on this dataset; by default the algorithm's
    `val_period`."""

    @property
    def kind_of_records(self) -> RecordKind | None:
        """`record_kind`, unless other keys of the section change it."""
        return self.record_kind


class EnvironmentConfig(ComponentSection):
    """Base section of every environment (`env.<task>`)."""

    name: str | None = None
    """Environment component; defaults to the name of the task."""
    env_cls: str | None = None
    """Dotted path of an environment class, used instead of a component. All other keys are passed to it as its config."""
    num_workers: int = Field(default=1, ge=1)
    """Number of worker processes of this environment."""
    python: str | None = None
    """Python interpreter that runs the environment and the agent, such as `venvs/game/bin/python`; the driver's by default."""
    max_rollout_turns: int | None = Field(default=None, ge=1)
    """Maximum number of turns in a rollout of this task. Defaults to the algorithm's `max_rollout_turns`, or, if that is null,
    to the number of turns that the environment needs (100 with an agent)."""
    step_timeout_s: float = Field(default=600.0, gt=0.0)
    """Timeout of one call to a worker, in seconds. A worker that exceeds it is replaced, and the call is repeated up to
    `rollout.retries` times."""
    reward_weights: dict[str, float] = Field(default_factory=dict)
    """Weights of the named rewards in the reward of a row, 1 by default. A name that the environment does not return is
    an error."""
    max_concurrency: int = Field(default=1, ge=1)
    """Number of calls that a worker runs at the same time. With 1, rows that are ready at the same moment share a call, and
    later rows wait until a worker is free. Above 1, each row is a separate call in a thread, so a slow row does not delay the
    others; `step` must then be thread-safe."""
    tool_parser: str | None = None
    """Parser of the model's tool calls: `response_template` (the tokenizer's own), `hermes`, `llama3`, `mistral`, or the dotted
    path of a class. For environments with tools, null selects the one that fits tokenizer and chat template; for others, null
    disables parsing."""

    agent: str | None = None
    """Dotted path of an agent: a function with its own control loop that runs each rollout of this task and samples through an
    OpenAI client. It returns the reward. If the section has an environment, it scores the last conversation instead."""
    agent_timeout_s: float = Field(default=600.0, gt=0.0)
    """Timeout of one call of the agent, in seconds. A rollout that exceeds it is not scored."""

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
    def _keys_agree(self) -> EnvironmentConfig:
        if self.name is not None and self.env_cls is not None:
            raise ValueError("name and env_cls both select the environment: keep one of them")
        if self.agent is None and self.agent_timeout_s != EnvironmentConfig.model_fields["agent_timeout_s"].default:
            raise ValueError("agent_timeout_s has no effect without `agent`: remove it")
        return self


class ToolEnvironmentConfig(EnvironmentConfig):
    """Base section of environments whose model calls tools."""

    max_tool_turns: int = Field(default=4, ge=1)
    """Maximum number of turns with tool calls in a rollout. One more turn is for the final answer; if it calls tools again, the
    rollout ends without an answer."""
    call_timeout_s: float = Field(default=30.0, gt=0.0)
    """Timeout of one tool call, in seconds. When it expires, the result is an error message."""
    max_concurrent_calls: int = Field(default=16, ge=1)
    """Maximum number of tool calls that run at the same time in a worker process."""
    max_result_chars: int = Field(default=4000, ge=1)
    """Maximum length of a tool result in characters. Longer results are truncated, with a note of their original length."""
    invalid_call_penalty: float = Field(default=0.0, ge=0.0)
    """Value subtracted from the reward for every invalid call: one that cannot be parsed, names an unknown tool, has wrong
    arguments, raises an exception or times out."""

    @property
    def turns_needed(self) -> int:
        return self.max_tool_turns + 1

    @property
    def reward_names(self) -> tuple[str, ...]:
        return ("invalid_calls",) if self.invalid_call_penalty else ()

    @property
    def min_turns(self) -> int:
        return 2


class RunSections(Protocol):
    """The sections of a run that a component's checks read; each attribute has the name of its section."""

    algorithm_name: str
    """Name of the algorithm."""
    algorithm: Any
    """The algorithm's section of the config; its `needs_generation` is true if it trains on rollouts."""
    policy: PolicyConfig
    value: PolicyConfig | None
    teacher: PolicyConfig | None
    data: Any
    env: dict[str, EnvironmentConfig]
    cluster: ClusterConfig
    model_fields_set: set[str]
    """Names of the sections that the config sets."""
