"""The sections of our environments and datasets; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Field, model_validator

from rl_core.config.paths import NAME_OR_PATH
from rl_core.config.python_sections import section_of_values
from rl_core.config.schema import DatasetConfig, EnvironmentConfig, Section
from rl_core.config.template_kwargs import check_template_kwargs

SectionT = TypeVar("SectionT", bound=Section)


def read_section(model: type[SectionT], section: SectionT | Mapping[str, Any] | None) -> SectionT:
    """The section as its model, from what a Python caller gives: the model itself, a dict such as YAML holds, or nothing.

    Raises:
        ConfigError: A key is unknown or a value is not allowed; one line each.
    """
    if isinstance(section, model):
        return section
    return section_of_values(model, dict(section or {}), name="", who=model.__name__)


class MathEnvironmentConfig(EnvironmentConfig):
    """`env.math`: the final answer must equal the expected one."""

    timeout_s: float = Field(default=5.0, gt=0.0)
    """CPU seconds of one comparison; its process is then killed and the answer counted wrong."""
    num_processes: int = Field(default=1, ge=1)
    """Comparing processes in each worker."""
    require_box: bool = True
    """Grade only what the last `\\boxed{}` holds. If false, a completion without a box is graded by its last stated answer."""
    allow_unevaluated: bool = False
    """Accept answers that leave arithmetic to do, such as `3 + 2` for 5 or `(x+1)^2` for `x^2+2x+1`."""


class ArithmeticEnvironmentConfig(EnvironmentConfig):
    """`env.arithmetic`: the completion's text must be the number."""

    format_reward: float = Field(default=0.0, ge=0.0)
    """Added where the completion is a whole number, right or wrong."""


class ArithmeticDatasetConfig(DatasetConfig):
    """Generated arithmetic: `a + b =` with as many digits as asked."""

    record_kind: ClassVar[Literal["conversations", "pairs"] | None] = "conversations"

    dataset_name: str = "arithmetic"
    num_samples: int = Field(default=4096, ge=1)
    """Records."""
    split: Literal["train", "validation"] = "train"
    """Which operand pairs are drawn: one pair in eight is kept for validation, in either order and for every operation."""
    operations: list[Literal["+", "-", "*"]] = Field(default=["+"], min_length=1)
    """What is drawn from, evenly."""
    min_digits: int = Field(default=1, ge=1, le=9)
    """Fewest digits of an operand."""
    max_digits: int = Field(default=2, ge=1, le=9)
    """Most digits of an operand."""
    seed: int = 0
    """Record i is a function of the seed, the split and i."""
    style: Literal["plain", "chat"] = "plain"
    """`plain` is the bare `12+34=`; `chat` asks in words and wants the answer in a box."""
    with_response: bool = False
    """Add the answer as the assistant's message, for supervised training."""
    forgotten_carries: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of those answers that forget to carry, as pupils do: 38+24 gives 52. What is expected stays exact."""

    @model_validator(mode="after")
    def _carries_are_of_sums(self) -> ArithmeticDatasetConfig:
        if self.forgotten_carries > 0 and (not self.with_response or self.operations != ["+"]):
            raise ValueError("forgotten_carries is about the answers to sums: set with_response: true and operations: ['+']")
        return self

    @model_validator(mode="after")
    def _digits_in_order(self) -> ArithmeticDatasetConfig:
        if self.min_digits > self.max_digits:
            raise ValueError(f"min_digits ({self.min_digits}) is above max_digits ({self.max_digits}): no operand is allowed")
        return self


class GuessNumberEnvironmentConfig(EnvironmentConfig):
    """`env.guess`: the model says numbers until it hits the secret one."""

    max_guesses: int = Field(default=7, ge=1)
    """Guesses after which the game is lost. Each takes a turn; a lower `max_rollout_turns` ends the game earlier."""
    higher: str = Field(default="higher", min_length=1)
    """What the environment says where the secret number is higher; a tiny tokenizer may want `+`."""
    lower: str = Field(default="lower", min_length=1)
    """What it says where the secret number is lower."""
    unreadable: str = Field(default="Say one whole number.", min_length=1)
    """What it says where the message is no whole number, which costs a guess."""

    @property
    def turns_needed(self) -> int:
        return self.max_guesses


class RewardModelEnvironmentConfig(EnvironmentConfig):
    """`env.reward_model`: a trained model scores the conversation."""

    model_name: Annotated[str, NAME_OR_PATH]
    """Folder or name of the reward model, a classifier of one label: of a checkpoint of `rm`, `step_<n>/policy/weights`."""
    tokenizer_name: Annotated[str | None, NAME_OR_PATH] = None
    """Name or folder of its tokenizer; the model's own by default."""
    chat_template: Annotated[str | None, NAME_OR_PATH] = None
    """A Jinja template, or the path of one; the tokenizer's own by default."""
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(check_template_kwargs)] = Field(default_factory=dict)
    """Variables for the chat template, such as `{enable_thinking: false}`."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations; scores are float32 in any case."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it computes; by default a GPU, if the environment's process sees one."""
    batch_size: int = Field(default=32, ge=1)
    """Conversations of one forward pass."""
    max_length: int = Field(default=4096, ge=1)
    """Most tokens that are read; of a longer conversation the last so many, for the answer is there."""
    shift: float = 0.0
    """Taken from every score: the scores' mean, for rewards about 0."""
    scale: float = 1.0
    """The reward is scale * (score - shift)."""

    @model_validator(mode="after")
    def _rewards_differ(self) -> RewardModelEnvironmentConfig:
        if self.scale == 0:
            raise ValueError("scale is 0, so that every reward would be 0: leave it out, or give the factor that is meant")
        return self


class GuessNumberDatasetConfig(DatasetConfig):
    """Secret numbers to guess."""

    record_kind: ClassVar[Literal["conversations", "pairs"] | None] = "conversations"

    dataset_name: str = "guess"
    num_samples: int = Field(default=1024, ge=1)
    """Records."""
    lowest: int = 1
    """Smallest secret number."""
    highest: int = 100
    """Largest secret number."""
    seed: int = 0
    """Record i is a function of the seed and i."""
    question: str = "I think of a whole number from {lowest} to {highest}. Say one number a turn, and nothing else."
    """The opening message; `{lowest}` and `{highest}` are filled in."""

    @model_validator(mode="after")
    def _range_in_order(self) -> GuessNumberDatasetConfig:
        if self.lowest > self.highest:
            raise ValueError(f"lowest ({self.lowest}) is above highest ({self.highest}): there is no number to think of")
        return self
