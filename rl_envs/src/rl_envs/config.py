"""Config sections of the environments and datasets. Lightweight imports only."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from rl_core.config.paths import NAME_OR_PATH
from rl_core.config.python_sections import read_section as read_section
from rl_core.config.schema import DatasetConfig, EnvironmentConfig
from rl_core.config.section import check_template_kwargs


class MathEnvironmentConfig(EnvironmentConfig):
    """`env.math`: the final answer must equal the expected one."""

    timeout_s: float = Field(default=5.0, gt=0.0)
    """CPU time limit of one comparison, in seconds. When it expires, the process is killed and the answer counts as wrong."""
    num_processes: int = Field(default=1, ge=1)
    """Number of processes per worker that compare answers."""
    require_box: bool = True
    r"""Whether to grade only the content of the last `\boxed{}`. If false, a completion without a box is graded by its last
    stated answer."""
    allow_unevaluated: bool = False
    """Whether to accept answers with unevaluated arithmetic, such as `3 + 2` for 5 or `(x+1)^2` for `x^2+2x+1`."""


class ArithmeticEnvironmentConfig(EnvironmentConfig):
    """`env.arithmetic`: the completion must be exactly the number."""

    format_reward: float = Field(default=0.0, ge=0.0)
    """Reward added if the completion is a whole number, correct or not."""


class GeneratedDatasetConfig(DatasetConfig):
    """Base section of the datasets that generate their records."""

    record_kind: ClassVar[Literal["conversations", "pairs"] | None] = "conversations"

    num_samples: int = Field(default=4096, ge=1)
    """Number of records."""


class ArithmeticDatasetConfig(GeneratedDatasetConfig):
    """Generated arithmetic problems of the form `a + b =`, with a configurable number of digits."""

    dataset_name: str = "arithmetic"
    """Name of a registered dataset, or the dotted path of its class."""
    split: Literal["train", "validation"] = "train"
    """Which operand pairs to draw. One pair in eight is reserved for validation, in either order and for every operation."""
    operations: list[Literal["+", "-", "*"]] = Field(default=["+"], min_length=1)
    """Operations to draw from, with equal probability."""
    min_digits: int = Field(default=1, ge=1, le=9)
    """Minimum number of digits of an operand."""
    max_digits: int = Field(default=2, ge=1, le=9)
    """Maximum number of digits of an operand."""
    seed: int = 0
    """Random seed. Record i depends only on the seed, the split and i."""
    style: Literal["plain", "chat"] = "plain"
    """`plain`: the prompt is `12+34=`; `chat`: a question in words that asks for the answer in `\\boxed{}`."""
    with_response: bool = False
    """Whether to add the answer as the assistant's message, for supervised training."""
    forgotten_carries: float = Field(default=0.0, ge=0.0, le=1.0)
    """Fraction of the answers of `with_response` that drop the carry, such as 38+24=52, to train a model that makes this
    mistake. The expected answer stays correct."""

    @model_validator(mode="after")
    def _carries_need_sums(self) -> ArithmeticDatasetConfig:
        if self.forgotten_carries > 0 and (not self.with_response or self.operations != ["+"]):
            raise ValueError("forgotten_carries applies to the answers of sums: set with_response: true and operations: ['+']")
        return self

    @model_validator(mode="after")
    def _digits_in_order(self) -> ArithmeticDatasetConfig:
        if self.min_digits > self.max_digits:
            raise ValueError(f"min_digits ({self.min_digits}) is above max_digits ({self.max_digits}): no operand is allowed")
        return self


class GuessNumberEnvironmentConfig(EnvironmentConfig):
    """`env.guess`: the model guesses numbers until it finds the secret one."""

    max_guesses: int = Field(default=7, ge=1)
    """Maximum number of guesses before the game is lost. Each takes one turn; a lower `max_rollout_turns` ends the game
    earlier."""
    higher: str = Field(default="higher", min_length=1)
    """Reply of the environment if the secret number is higher. A tiny tokenizer may need `+`."""
    lower: str = Field(default="lower", min_length=1)
    """Reply of the environment if the secret number is lower."""
    unreadable: str = Field(default="Say one whole number.", min_length=1)
    """Reply of the environment if the message is not a whole number, which counts as a guess."""

    @property
    def turns_needed(self) -> int:
        return self.max_guesses


class RewardModelEnvironmentConfig(EnvironmentConfig):
    """`env.reward_model`: a trained reward model scores the conversation."""

    model_name: Annotated[str, NAME_OR_PATH]
    """Folder or name of the reward model, a classifier with one label, such as `step_<n>/policy/weights` of an `rm`
    checkpoint."""
    tokenizer_name: Annotated[str | None, NAME_OR_PATH] = None
    """Name or folder of the tokenizer; defaults to that of the model."""
    chat_template: Annotated[str | None, NAME_OR_PATH] = None
    """Jinja chat template or its path; defaults to the one of the tokenizer."""
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(check_template_kwargs)] = Field(default_factory=dict)
    """Variables passed to the chat template, such as `{enable_thinking: false}`."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Data type of weights and activations. Scores are always float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the reward model. `auto` uses a GPU if the environment's process sees one."""
    batch_size: int = Field(default=32, ge=1)
    """Number of conversations per forward pass."""
    max_length: int = Field(default=4096, ge=1)
    """Maximum number of tokens to score. Longer conversations keep their last tokens, which contain the answer."""
    shift: float = 0.0
    """Value subtracted from every score, for example the mean score, so that rewards are centered at 0."""
    scale: float = 1.0
    """Factor of the reward: scale * (score - shift)."""

    @model_validator(mode="after")
    def _rewards_differ(self) -> RewardModelEnvironmentConfig:
        if self.scale == 0:
            raise ValueError("scale is 0, so every reward would be 0: remove it or set another factor")
        return self


class GuessNumberDatasetConfig(GeneratedDatasetConfig):
    """Secret numbers to guess."""

    dataset_name: str = "guess"
    """Name of a registered dataset, or the dotted path of its class."""
    num_samples: int = Field(default=1024, ge=1)
    """Number of records."""
    lowest: int = 1
    """Smallest secret number."""
    highest: int = 100
    """Largest secret number."""
    seed: int = 0
    """Random seed. Record i depends only on the seed and i."""
    question: str = "I think of a whole number from {lowest} to {highest}. Say one number a turn, and nothing else."
    """First message to the model; `{lowest}` and `{highest}` are replaced by their values."""

    @model_validator(mode="after")
    def _range_in_order(self) -> GuessNumberDatasetConfig:
        if self.lowest > self.highest:
            raise ValueError(f"lowest ({self.lowest}) is above highest ({self.highest}): the range is empty")
        return self
