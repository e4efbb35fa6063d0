"""What an algorithm needs from the runtime: prompts, samples, turns, records, models. Does not import torch.

The runtime reads `RuntimeNeeds` and never a field of an algorithm's section by name, so a custom algorithm may choose its own
field names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from rl_core.config.schema import RecordKind
from rl_core.config.section import Section


class AlgorithmPathConfig(Section):
    """An algorithm given by import paths. Its settings are in a separate section with a name of your choice."""

    train: str
    """Dotted path of the training function, `train(config, run)`. Only imported by a run."""
    config: str
    """Dotted path of its settings model, a subclass of `AlgorithmConfig`. Also imported by `rlcore validate`."""


Companion = Literal["value", "teacher"]
"""A model in addition to the policy, by its section: `value`, a critic that is trained as well, or `teacher`, which is
frozen."""


@dataclass(frozen=True, kw_only=True)
class RolloutNeeds:
    """Rollouts that a step needs."""

    prompts_per_draw: int
    """P, number of prompts that a step takes at once (`RolloutSource.take`); at least 1."""
    samples_per_prompt: int
    """G, number of rollouts per prompt; at least 1."""
    sampled_fraction: float = 1.0
    """Probability that a step samples its rows. In all other steps, the rows are answers from the training data."""
    rewarded: bool = True
    """Whether rollouts must be scored, so that the config must have a section `env`."""
    accepts_segments: bool = False
    """Whether a rollout may have several rows (`rollout_ids`), one for each segment. Otherwise, a config in which rollouts can
    have several segments is refused."""

    accepts_stale: bool = False
    """Whether rows may be sampled with the weights of earlier steps (`rollout.max_staleness` above 0)."""

    selects_groups: bool = False
    """Whether it passes a selection to `RolloutSource.take`, so that the prompts of a step depend on their rewards."""

    greedy_baseline: bool = False
    """Whether each prompt also has a greedy rollout, which is scored and not trained on. Its reward is `baseline_rewards` of
    the rows of the prompt."""

    def __post_init__(self) -> None:
        _at_least_one(prompts_per_draw=self.prompts_per_draw, samples_per_prompt=self.samples_per_prompt)
        if not 0.0 <= self.sampled_fraction <= 1.0:
            raise ValueError(f"sampled_fraction is {self.sampled_fraction}: it must be a probability from 0 to 1")

    @property
    def rows_per_draw(self) -> int:
        """B = P x G, number of rows of one draw."""
        return self.prompts_per_draw * self.samples_per_prompt

    @property
    def rollouts_per_prompt(self) -> int:
        """Number of rollouts that are played for each prompt: G, and the greedy one."""
        return self.samples_per_prompt + self.greedy_baseline


@dataclass(frozen=True, kw_only=True)
class RecordNeeds:
    """Records that a step needs, for an algorithm that trains on the data itself."""

    records_per_step: int
    """Number of conversations, pairs of a chosen and a rejected answer, or labelled answers per batch; at least 1."""
    pairs: bool = False
    """Whether a record is a pair of answers."""
    unpaired: bool = False
    """Whether a record is one answer with a label, desirable or undesirable."""
    only_final_answer: bool = False
    """Whether to train only on the last assistant message."""

    def __post_init__(self) -> None:
        _at_least_one(records_per_step=self.records_per_step)
        if self.pairs and self.unpaired:
            raise ValueError("set pairs or unpaired, not both: a record is a pair of answers, or one answer with a label")

    @property
    def kind(self) -> RecordKind:
        """What a record is."""
        return "pairs" if self.pairs else "unpaired" if self.unpaired else "conversations"


@dataclass(frozen=True, kw_only=True)
class TeacherPrompt:
    """A prompt that the teacher reads instead of the policy's; at most one of `template` and `function` is set."""

    key: str
    """Config key, for errors."""
    template: str | None = None
    """Text that replaces the first user message; its fields are those of `rl_train.rollouts.teacher_rows`."""
    function: str | None = None
    """Import path of a function of a row that returns this text, or all messages of the prompt."""
    own_tokens: bool = False
    """Whether the teacher reads prompt and answer as text, in the tokens of another tokenizer."""


@dataclass(frozen=True, kw_only=True)
class RuntimeNeeds:
    """Everything that an algorithm needs from the runtime.

    An algorithm with neither `rollouts` nor `records` needs no training data.
    """

    rollouts: RolloutNeeds | None = None
    """Rollouts of a step (`run.rollouts`); requires `policy.generation`."""
    records: RecordNeeds | None = None
    """Records of a step (`run.batches`)."""
    max_turns: int | None = None
    """Maximum number of turns in a rollout, in training and validation. None means as many as the environment needs."""
    samples_in_validation: bool = False
    """Whether validation samples and scores answers although training does not. Implied by `rollouts`."""
    val_samples_per_prompt: int = 1
    """Number of rollouts per validation prompt; at least 1."""
    companions: tuple[Companion, ...] = ()
    """Models in addition to the policy. The config must have their sections."""
    teaches_itself: bool = False
    """Whether the teacher is the policy, with the weights before the step, instead of a companion."""
    teacher_decay: float | None = None
    """With `teaches_itself`: the teacher has the moving average of the policy's weights, with this decay per step."""
    teacher_prompt: TeacherPrompt | None = None
    """The prompt of the teacher; None for that of the policy."""
    extra_scored_rows: int = 0
    """Number of rows that a step scores under the policy and the reference policy, and does not train."""

    def __post_init__(self) -> None:
        _at_least_one(max_turns=self.max_turns, val_samples_per_prompt=self.val_samples_per_prompt)
        unknown = set(self.companions) - set(get_args(Companion))
        if unknown:
            raise ValueError(f"companions has {', '.join(sorted(unknown))}: choose from {', '.join(get_args(Companion))}")
        if self.rollouts is not None and self.records is not None:
            raise ValueError("set rollouts or records, not both; to mix data answers into rollouts, use `sampled_fraction`")

    @property
    def samples(self) -> bool:
        """Whether the run needs an engine, environments and, for validation, prompts."""
        return self.rollouts is not None or self.samples_in_validation

    @property
    def has_teacher(self) -> bool:
        """Whether a teacher scores the rows of a step."""
        return self.teaches_itself or "teacher" in self.companions

    @property
    def training_data(self) -> bool:
        """Whether the run needs training data."""
        return self.rollouts is not None or self.records is not None


def _at_least_one(**counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name} is {count}: it must be at least 1")
