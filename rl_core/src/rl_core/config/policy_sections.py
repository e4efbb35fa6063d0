"""The section `policy` and what lies in it: model, batching, optimizer, generation; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from rl_core.config.paths import NAME_OR_PATH
from rl_core.config.section import ComponentSection, Section
from rl_core.config.template_kwargs import check_template_kwargs
from rl_core.config.written import Path
from rl_core.plugins.component import is_path

if TYPE_CHECKING:
    from rl_core.config.schema import ClusterConfig, RunConfig


class TokenizerConfig(Section):
    """Where the tokenizer comes from."""

    name: Annotated[str | None, NAME_OR_PATH] = None
    """Name, folder or GGUF file; the policy's model by default."""
    chat_template: Annotated[str | None, NAME_OR_PATH] = None
    """A Jinja template, or the path of one; the tokenizer's own by default."""
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(check_template_kwargs)] = Field(default_factory=dict)
    """Variables for the chat template, such as `{enable_thinking: false}`, in everything that is rendered; a name that the
    template does not read is an error."""


_ADAMW = "torch.optim.AdamW"
_ADAMW_DEFAULTS = {"lr": 1e-5, "weight_decay": 0.0}


class OptimizerConfig(Section):
    """The optimizer, by dotted name."""

    name: str = _ADAMW
    """Any class that takes parameters and keyword arguments."""
    kwargs: dict[str, Any] = Field(default_factory=lambda: dict(_ADAMW_DEFAULTS))
    """Its keyword arguments; AdamW keeps those of its defaults that are not given, other optimizers have their own."""

    @field_validator("name")
    @classmethod
    def _is_a_path(cls, name: str) -> str:
        if not is_path(name):
            raise ValueError(f"{name!r} is no dotted name. Write it in full, such as {_ADAMW}")
        return name

    @model_validator(mode="before")
    @classmethod
    def _only_adamw_has_our_defaults(cls, given: Any) -> Any:
        # An override of the learning rate must not turn on PyTorch's weight decay.
        if not isinstance(given, dict) or not isinstance(given.get("kwargs", {}), dict):
            return given
        defaults = _ADAMW_DEFAULTS if given.get("name", _ADAMW) == _ADAMW else {}
        return {**given, "kwargs": {**defaults, **given.get("kwargs", {})}}


class SchedulerConfig(Section):
    """The learning-rate scheduler, by dotted name; it steps, and counts, once an optimizer step."""

    name: str
    """Any class or factory that takes the optimizer and keyword arguments, or `linear`, `cosine`, `constant` with
    `num_warmup_steps`, and `num_training_steps`: all that the run makes, by default."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""


class DynamicBatchingConfig(Section):
    """Microbatches by token budget: rows sorted by length, padded to the longest of each microbatch."""

    enabled: bool = False
    """Use it."""
    train_mb_tokens: int = Field(default=4096, ge=1)
    """Most padded tokens of a training microbatch."""
    logprob_mb_tokens: int = Field(default=8192, ge=1)
    """Most padded tokens of a scoring microbatch."""
    sequence_length_round: int = Field(default=8, ge=1)
    """Padded lengths are multiples of it."""


class SequencePackingConfig(Section):
    """Microbatches by packing: several rows in one, attention block-diagonal."""

    enabled: bool = False
    """Use it."""
    train_mb_tokens: int = Field(default=4096, ge=1)
    """Most tokens of a training microbatch."""
    logprob_mb_tokens: int = Field(default=8192, ge=1)
    """Most tokens of a scoring microbatch."""
    algorithm: Literal["concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing"] = (
        "modified_first_fit_decreasing"
    )
    """How rows are put into microbatches."""
    sequence_length_pad_multiple: int = Field(default=1, ge=1)
    """Each row takes a multiple of so many tokens."""


class GenerationConfig(ComponentSection):
    """What every generation backend's section has (`policy.generation`)."""

    backend: str
    """The generation component, or a dotted path."""
    model_name: Annotated[str | None, NAME_OR_PATH] = None
    """Name, folder or GGUF file; the policy's model by default."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Most tokens of one completion."""
    temperature: float = Field(default=1.0, gt=0.0)
    """Logits are divided by it. Algorithms that sample score tokens at the same temperature; all others score at 1.0."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample from the smallest set of tokens whose probability reaches it."""
    top_k: int | None = Field(default=None, ge=1)
    """Sample from the so many likeliest tokens."""
    stop_strings: list[str] | None = None
    """Strings that end a completion; they stay in it."""
    stop_token_ids: list[int] | None = None
    """Tokens that end a completion, besides the end-of-sequence token; they stay in it."""
    val_temperature: float = Field(default=0.0, ge=0.0)
    """Temperature of validation; 0 is greedy."""
    python: Annotated[str | None, NAME_OR_PATH] = None
    """Interpreter of another environment for the workers, such as `venvs/sampler/bin/python`."""
    num_workers: int | None = Field(default=None, ge=1)
    """Replicas; as many as the policy has ranks by default."""
    max_restarts: int = Field(default=3, ge=0)
    """Workers that may be replaced after they died, over a run; their rows are sampled again. 0 never."""
    refit_buffer_mib: int = Field(default=512, ge=1)
    """Most MiB of weights on their way at one time."""
    refit_transport: str | None = None
    """Weight transport by name; the first that both sides speak by default."""

    refit_folder: Annotated[str | None, NAME_OR_PATH] = None
    """Where weights that travel by disk (`refit_transport: disk`) are written; policy and engine both see it."""
    refit_canary: bool = True
    """After each refit, compare log-probabilities of a few sampled rows between engine and policy, and stop the run where they
    differ. Engines that cannot digest the tensors that they compute with (vLLM) require it."""
    canary_tolerance: float | None = Field(default=None, gt=0.0)
    """Largest allowed mean difference of those log-probabilities, in nats per token. By default 0.001 where both sides compute
    in float32; otherwise 0.1 at the first sync, and then 1.5 times the error of the first sync."""

    @model_validator(mode="after")
    def _validation_is_greedy_or_as_in_training(self) -> Self:
        if self.val_temperature not in (0.0, self.temperature):
            raise ValueError(
                f"val_temperature {self.val_temperature} is neither 0 (greedy) nor the temperature of training, "
                f"{self.temperature}; an engine samples at one temperature"
            )
        return self

    def sampling_filters(self) -> dict[Path, Any]:
        """Keys of this section that drop tokens before one is drawn, each with the value that drops none.

        The most likely token and its probability under the whole distribution are not changed by them.
        """
        neutral: dict[Path, Any] = {("top_p",): 1.0, ("top_k",): None}
        return {key: value for key, value in neutral.items() if getattr(self, str(key[0])) != value}

    def logit_changes(self) -> dict[Path, Any]:
        """Keys of this section that change logits other than by the temperature, each with the value that changes none.

        A backend with such keys (a repetition penalty, a logit bias) returns those that are set. No policy scores tokens under
        the changed distribution, so algorithms that train on samples refuse them.
        """
        return {}

    def for_policy(self, policy: PolicyConfig) -> Self:
        """This section with what it leaves open taken from the policy; a backend adds its own."""
        return self.model_copy(update={"model_name": self.model_name or policy.model_name})


class PolicyConfig(ComponentSection):
    """What every policy backend's section has (`policy`)."""

    backend: str
    """The policy component, or a dotted path."""
    model_name: Annotated[str, NAME_OR_PATH]
    """Name, folder or GGUF file of the model."""
    head: Literal["tokens", "scalar"] = "tokens"
    """What the model ends in: scores of the next token, or one number after each (a value model, a reward model)."""
    frozen: bool = False
    """Scores and is never trained, such as a teacher: no memory is spent on an optimizer and what it steps on."""
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    """The tokenizer; the model's by default."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations; optimizer state and log-probabilities are float32 in any case."""
    max_total_sequence_length: int = Field(default=1024, ge=2)
    """Most tokens of a row, prompt and completion."""
    train_global_batch_size: int | None = Field(default=None, ge=1)
    """Rows of one optimizer step, over all ranks; all rows of a step by default."""
    train_micro_batch_size: int = Field(default=8, ge=1)
    """Rows of one forward-backward on one rank, where neither token budget nor packing is on."""
    logprob_batch_size: int = Field(default=16, ge=1)
    """Rows of one scoring pass on one rank, where neither token budget nor packing is on."""
    dynamic_batching: DynamicBatchingConfig = Field(default_factory=DynamicBatchingConfig)
    """Microbatches by token budget."""
    sequence_packing: SequencePackingConfig = Field(default_factory=SequencePackingConfig)
    """Microbatches by packing."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    max_grad_norm: float | None = Field(default=1.0, gt=0.0)
    """Clip the global gradient norm to it; null leaves gradients as they are."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """The optimizer."""
    scheduler: SchedulerConfig | None = None
    """The learning-rate schedule; constant by default."""
    generation: GenerationConfig | None = None
    """The generation backend; needed by algorithms that sample."""
    python: Annotated[str | None, NAME_OR_PATH] = None
    """Interpreter of another environment for the workers."""

    def conflicts(self, run: RunConfig) -> Iterator[tuple[Path, str]]:
        """What of the run the backend cannot work with: each key of this section that is to blame, and why.

        It is asked of the policy and of the models beside it alike; `run.policy is self` says which this is.
        """
        yield from ()

    @property
    def scoring_temperature(self) -> float:
        """Temperature that the workers of this section divide logits by when they score tokens: that of `generation`."""
        return self.generation.temperature if self.generation is not None else 1.0

    def data_ranks(self, cluster: ClusterConfig) -> int:
        """Ranks that a batch is split over; a backend whose ranks hold one copy of the model together has fewer."""
        return 1 if cluster.backend == "in_process" else cluster.num_nodes * cluster.workers_per_node

    @model_validator(mode="after")
    def _one_way_of_batching(self) -> PolicyConfig:
        if self.dynamic_batching.enabled and self.sequence_packing.enabled:
            raise ValueError("dynamic_batching and sequence_packing both decide what a microbatch is: enable one of them")
        return self
