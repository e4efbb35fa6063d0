"""The sections `sft`, `dpo`, `kto`, `rm` and `distillation`. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from rl_core.config.diagnostics import KeyPath
from rl_core.plugins.import_path import missing_target
from rl_train.algorithms.losses.config import DistillationLossConfig, NLLLossConfig, PolicyGradientLossConfig
from rl_train.algorithms.losses.preference_configs import KTOLossConfig, PreferenceLossConfig
from rl_train.algorithms.policy_configs import RolloutAlgorithmConfig
from rl_train.config.algorithm import RecordNeeds, RolloutNeeds, RuntimeNeeds, TeacherPrompt
from rl_train.config.rules.components import validates
from rl_train.config.schema import AlgorithmConfig, RunConfig, TrainingPlan
from rl_train.prompts.prompt_files import placeholders


class SFTConfig(AlgorithmConfig):
    """Supervised fine-tuning (SFT)."""

    default_loss: ClassVar[str] = "nll"

    records_key: ClassVar[str | None] = "global_batch_size"

    global_batch_size: int = Field(default=128, ge=1)
    """Number of rows per step; the last step of an epoch may have fewer. `policy.train_global_batch_size` splits them into
    optimizer steps."""
    only_unmask_final: bool = False
    """Whether to train only on the last assistant message instead of all of them."""
    val_accuracy: bool = False
    """Whether validation also completes the prompts greedily and scores the answers. Requires `policy.generation` and `env`."""
    max_rollout_turns: int | None = Field(default=None, ge=1)
    """Maximum number of turns in a validation rollout; null means as many as the environment needs."""

    @property
    def runtime_needs(self) -> RuntimeNeeds:
        return RuntimeNeeds(
            records=RecordNeeds(records_per_step=self.global_batch_size, only_final_answer=self.only_unmask_final),
            samples_in_validation=self.val_accuracy,
            max_turns=self.max_rollout_turns,
        )

    def training_plan(self, model: str, run: RunConfig) -> TrainingPlan | None:
        return TrainingPlan(steps=self.max_num_steps, rows=self.global_batch_size)


class PairsConfig(AlgorithmConfig):
    """Base of the sections of algorithms that train on pairs: two rows each, the chosen answer first."""

    records_key: ClassVar[str | None] = "global_batch_size"

    global_batch_size: int = Field(default=32, ge=1)
    """Number of pairs per step; the last step of an epoch may have fewer. `policy.train_global_batch_size` (in rows, two per
    pair) splits them into optimizer steps."""
    val_batch_size: int = Field(default=128, ge=1)
    """Number of pairs per validation batch."""

    @property
    def runtime_needs(self) -> RuntimeNeeds:
        return RuntimeNeeds(records=RecordNeeds(records_per_step=self.global_batch_size, pairs=True))

    def training_plan(self, model: str, run: RunConfig) -> TrainingPlan | None:
        return TrainingPlan(steps=self.max_num_steps, rows=2 * self.global_batch_size, rows_per_unit=2)

    def conflicts(self, run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
        rows = run.policy.train_global_batch_size
        if rows is not None and rows % 2:
            yield ("policy", "train_global_batch_size"), f"{rows} rows would split a pair (two rows): set an even number."


class DPOConfig(PairsConfig):
    """Direct preference optimization (DPO) and its variants."""

    default_loss: ClassVar[str] = "dpo"

    def conflicts(self, run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
        if isinstance(run.loss_fn, PolicyGradientLossConfig | NLLLossConfig | KTOLossConfig):
            yield (
                ("loss_fn", "name"),
                f"{run.loss_fn.name} does not use pairs of answers, so dpo cannot use it. Use dpo, ipo, dpo_hinge, simpo or "
                "orpo.",
            )
        yield from super().conflicts(run)


class KTOConfig(AlgorithmConfig):
    """Kahneman-Tversky optimization (KTO) on answers with a label."""

    default_loss: ClassVar[str] = "kto"

    records_key: ClassVar[str | None] = "global_batch_size"

    global_batch_size: int = Field(default=64, ge=2)
    """Number of answers per step, from which the KL to the reference policy is estimated; the last step of an epoch may have
    fewer. `policy.train_global_batch_size` splits them into optimizer steps."""

    @property
    def runtime_needs(self) -> RuntimeNeeds:
        rows = self.global_batch_size
        return RuntimeNeeds(records=RecordNeeds(records_per_step=rows, unpaired=True), extra_scored_rows=rows)

    def training_plan(self, model: str, run: RunConfig) -> TrainingPlan | None:
        return TrainingPlan(steps=self.max_num_steps, rows=self.global_batch_size)

    def conflicts(self, run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
        if isinstance(run.loss_fn, PolicyGradientLossConfig | NLLLossConfig | PreferenceLossConfig):
            yield ("loss_fn", "name"), f"{run.loss_fn.name} does not use the labels of answers. Remove it, or use kto."


class RewardModelConfig(PairsConfig):
    """Reward model training on preferences."""

    default_loss: ClassVar[str] = "bradley_terry"
    head: ClassVar[Literal["tokens", "scalar"]] = "scalar"

    def conflicts(self, run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
        if run.loss_fn.head != "scalar":
            yield (
                ("loss_fn", "name"),
                f"{run.loss_fn.name} needs log-probabilities of tokens, but a reward model only returns scores: remove it, or "
                "use bradley_terry.",
            )
        if run.policy.generation is not None:
            yield ("policy", "generation"), "reward model training does not sample: remove the section."
        yield from super().conflicts(run)


class DistillationConfig(RolloutAlgorithmConfig):
    """On-policy distillation: a teacher scores each token of the student's answers."""

    default_loss: ClassVar[str] = "distillation"

    num_prompts_per_step: int = Field(default=64, ge=1)
    """P, number of prompts per step."""
    student_data_fraction: float = Field(default=1.0, ge=0.0, le=1.0)
    """GKD's lambda: probability that the rows of a step are sampled from the student. Otherwise they are answers from the
    training data."""
    teacher_weights: Literal["frozen", "current", "average"] = "frozen"
    """`frozen`: the teacher is the model of the section `teacher`, such as another model, or the policy's with its initial
    weights. `current`: the teacher is the policy itself with the weights before each step, without a section `teacher` and
    without memory for a second model; it needs its own prompt. `average`: as `current`, with an exponential moving average of
    the policy's weights."""
    teacher_decay: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Required with `average`, and only used there: d in average <- d * average + (1 - d) * weights, after each step."""
    teacher_prompt: str | None = None
    """Text that the teacher reads instead of the first user message. `{question}` is replaced by that message, `{name}` by a
    field of the row's metadata, such as `{expected_answer}`, `{completion}` by the student's answer, and `{feedback}` by what
    the environment wrote after it. By default, the teacher reads the student's prompt."""
    teacher_prompt_fn: str | None = None
    """Import path of a function that replaces `teacher_prompt`: it is called with a row and returns the text, or all messages
    of the teacher's prompt."""

    teacher_tokenizer: Literal["policy", "own"] = "policy"
    """`policy`: the teacher has the policy's tokenizer. `own`: it may have another one, and reads prompt and answer as text,
    with its own chat template. Log-probabilities are compared over the shortest spans of text that end with a token of both;
    requires `loss_fn.topk: null`."""

    @field_validator("teacher_prompt")
    @classmethod
    def _names_its_fields(cls, text: str | None) -> str | None:
        if text is not None and "" in placeholders(text):
            raise ValueError("{} cannot be filled: write the name of a field, such as {question}")
        return text

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if self.teacher_prompt is not None and self.teacher_prompt_fn is not None:
            raise ValueError("teacher_prompt and teacher_prompt_fn are both set: keep one of them")
        return self

    @model_validator(mode="after")
    def _average_has_a_decay(self) -> Self:
        if (self.teacher_weights == "average") != (self.teacher_decay is not None):
            raise ValueError(
                "teacher_decay is only for teacher_weights: average, and required there: "
                + ("remove it" if self.teacher_decay is not None else "set it, for example to 0.99")
            )
        return self

    @property
    def _prompt(self) -> TeacherPrompt | None:
        own = self.teacher_tokenizer == "own"
        for key in ("teacher_prompt", "teacher_prompt_fn"):
            if getattr(self, key) is not None:
                return TeacherPrompt(key=key, template=self.teacher_prompt, function=self.teacher_prompt_fn, own_tokens=own)
        return TeacherPrompt(key="teacher_tokenizer", own_tokens=True) if own else None

    @property
    def runtime_needs(self) -> RuntimeNeeds:
        return RuntimeNeeds(
            rollouts=RolloutNeeds(
                prompts_per_draw=self.num_prompts_per_step,
                samples_per_prompt=self.num_generations_per_prompt,
                sampled_fraction=self.student_data_fraction,
                rewarded=False,
                accepts_segments=self._prompt is None,
                accepts_stale=True,
            ),
            max_turns=self.max_rollout_turns,
            companions=("teacher",) if self.teacher_weights == "frozen" else (),
            teaches_itself=self.teacher_weights != "frozen",
            teacher_decay=self.teacher_decay,
            teacher_prompt=self._prompt,
        )

    def conflicts(self, run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
        loss, generation = run.loss_fn, run.policy.generation
        if isinstance(loss, PolicyGradientLossConfig | NLLLossConfig | PreferenceLossConfig | KTOLossConfig):
            yield (
                ("loss_fn", "name"),
                f"{loss.name} does not use a teacher, so {run.algorithm_name} cannot use it. Use distillation.",
            )
        if self.student_data_fraction < 1.0 and self.max_num_epochs is not None:
            yield (
                (run.algorithm_name, "max_num_epochs"),
                "if student_data_fraction is below 1, only some steps draw prompts, so an epoch is not a fixed number of "
                "steps. Set only max_num_steps.",
            )
        yield from self._teacher_conflicts(run)
        if generation is None or not isinstance(loss, DistillationLossConfig):
            return
        if self.student_data_fraction < 1.0 and loss.topk is None:
            yield (
                (run.algorithm_name, "student_data_fraction"),
                "if loss_fn.topk is null, the KL to the teacher is estimated from tokens sampled from the student, which "
                "answers from the data are not. Set student_data_fraction to 1, or set loss_fn.topk.",
            )
        if validates(run) and loss.topk is None and generation.val_temperature == 0.0:
            yield (
                ("policy", "generation", "val_temperature"),
                "validation is greedy, but if loss_fn.topk is null, the KL to the teacher is estimated from tokens sampled "
                "from the student's distribution. Set val_temperature to the training temperature "
                f"({generation.temperature:g}), or set loss_fn.topk.",
            )

    def _tokenizer_conflicts(self, run: RunConfig) -> Iterator[str]:
        loss = run.loss_fn
        if self.teacher_weights != "frozen":
            yield "own is only for a frozen teacher, since the policy has its own tokenizer already. Remove this key."
        if run.teachers:
            yield "own is not supported with a teacher for each task. Use one section `teacher`, or remove this key."
        if isinstance(loss, DistillationLossConfig) and loss.topk is not None:
            yield "own compares spans of sampled text, not distributions. Set loss_fn: {divergence: reverse_kl, topk: null}."
        if any(turns > 1 for turns in run.max_turns.values()):
            yield f"own is only supported for rollouts of one turn. Set {run.algorithm_name}.max_rollout_turns: 1."

    def _teacher_conflicts(self, run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
        prompt = self._prompt
        if self.teacher_tokenizer == "own":
            yield from (((run.algorithm_name, "teacher_tokenizer"), message) for message in self._tokenizer_conflicts(run))
        if prompt is None and self.teacher_weights != "frozen":
            yield (
                (run.algorithm_name, "teacher_weights"),
                "with the student's weights and prompt, the teacher is the student, and nothing is learned. Set teacher_prompt "
                "(or teacher_prompt_fn), or use a section `teacher`.",
            )
        if prompt is not None and self.student_data_fraction < 1.0:
            yield (
                (run.algorithm_name, prompt.key),
                "the teacher's prompt is written for sampled answers. Set student_data_fraction to 1, or remove this key.",
            )
        name = self.teacher_prompt_fn
        if name is not None and (problem := missing_target(name)) is not None:
            yield (run.algorithm_name, "teacher_prompt_fn"), f"{name} cannot be imported: {problem}"
