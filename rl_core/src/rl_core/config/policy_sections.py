"""The section `policy` and its subsections: model, batching, optimizer, generation. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from rl_core.config.diagnostics import KeyPath
from rl_core.config.section import (
    NAME_OR_PATH,
    ClusterConfig,
    ComponentSection,
    Devices,
    ResourcesConfig,
    Section,
    check_template_kwargs,
)
from rl_core.plugins.component import is_path


class TokenizerConfig(Section):
    """Which tokenizer and chat template to use."""

    name: Annotated[str | None, NAME_OR_PATH] = None
    """Name or folder of the tokenizer, a GGUF file, or `module:name`, a class or function that is called with the model's name;
    defaults to the policy's model."""
    chat_template: Annotated[str | None, NAME_OR_PATH] = None
    """Jinja chat template or its path; defaults to the one of the tokenizer."""
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(check_template_kwargs)] = Field(default_factory=dict)
    """Variables passed to the chat template whenever it is rendered, such as `{enable_thinking: false}`. A name that the
    template does not use is an error."""


class PolicyTokenizerConfig(TokenizerConfig):
    """Tokenizer and chat template of a run, and what text says of special tokens."""

    visible_special_tokens: Literal["content", "all", "none"] = "content"
    """Special tokens in the text of completions, for rewards, tools, logs and clients. `content` hides those that mark
    beginning, end, padding, unknown text and the turns of the chat template; `none` hides all."""
    parse_control_tokens: bool = False
    """Whether the text of a control token in messages, such as `<|im_end|>` in a user's message, becomes that token. By
    default, it is tokenized as text. Control tokens are those that `visible_special_tokens: content` hides."""


_ADAMW = "torch.optim.AdamW"
_ADAMW_DEFAULTS = {"lr": 1e-5, "weight_decay": 0.0}


def _check_path(name: str) -> str:
    if not is_path(name):
        raise ValueError(f"{name!r} is not a dotted path. Write it in full, such as {_ADAMW}")
    return name


def _check_group(name: str) -> str:
    if not name.replace("-", "").isidentifier() or name == REST:
        raise ValueError(f"{name!r} cannot name a group: use letters, digits, `_` and `-`, and not {REST!r}")
    return name


REST = "rest"
"""Name in metrics of the parameters that are in no group of an optimizer."""
_OptimizerName = Annotated[str, AfterValidator(_check_path)]


class OptimizerGroupConfig(Section):
    """Parameters with another optimizer, or other arguments, than the rest."""

    params: str | Annotated[list[str], Field(min_length=1)] | None = None
    """Names of parameters, or glob patterns such as `*.q_proj.weight`. By default, the matrices of layers that no other group
    names: weights with two axes, without embeddings, output layers and what is not in a list of layers."""
    name: _OptimizerName | None = None
    """Dotted name of the optimizer class; by default that of `optimizer`, with its `kwargs` where this group sets none."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the optimizer."""


class OptimizerConfig(Section):
    """Optimizer class and its arguments."""

    name: _OptimizerName = _ADAMW
    """Dotted name of any class that takes parameters and keyword arguments."""
    kwargs: dict[str, Any] = Field(default_factory=lambda: dict(_ADAMW_DEFAULTS))
    """Keyword arguments of the optimizer. The default optimizer keeps the defaults shown here for arguments that are not given;
    others use their own defaults."""
    groups: dict[Annotated[str, AfterValidator(_check_group)], OptimizerGroupConfig] = Field(default_factory=dict)
    """Parameters that are updated differently, by a name for the metric `lr/<name>`; `name` and `kwargs` are for all others."""

    def of_group(self, name: str) -> OptimizerConfig:
        """The optimizer of a group, with the arguments that it is created with."""
        group = self.groups[name]
        inherited = self.kwargs if group.name is None else {}
        return OptimizerConfig(name=group.name or self.name, kwargs={**inherited, **group.kwargs})

    @model_validator(mode="before")
    @classmethod
    def _only_known_optimizers_have_our_defaults(cls, given: Any) -> Any:
        # An override of the learning rate must not turn on PyTorch's weight decay. A plugin's section may have other defaults.
        if not isinstance(given, dict) or not isinstance(given.get("kwargs", {}), dict):
            return given
        name, kwargs = (cls.model_fields[key].get_default(call_default_factory=True) for key in ("name", "kwargs"))
        defaults = {_ADAMW: _ADAMW_DEFAULTS, name: kwargs}.get(given.get("name", name), {})
        return {**given, "kwargs": {**defaults, **given.get("kwargs", {})}}


class SchedulerConfig(Section):
    """Learning-rate schedule. It steps once per optimizer step, and its lengths count optimizer steps."""

    name: str
    """Schedule: `linear`, `cosine`, `constant`, or the dotted name of a class or factory.

    The named schedules take `num_warmup_steps`; `linear` and `cosine` also take `num_training_steps`, by default all optimizer
    steps of the run. A class or factory is called with the optimizer and `kwargs`.
    """
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the schedule."""


class DynamicBatchingConfig(Section):
    """Microbatches with a token budget: rows are sorted by length and padded to the longest row of their microbatch."""

    enabled: bool = False
    """Whether to form microbatches by the token budgets below instead of by numbers of rows."""
    train_mb_tokens: int = Field(default=4096, ge=1)
    """Maximum number of tokens in a training microbatch, including padding."""
    logprob_mb_tokens: int = Field(default=8192, ge=1)
    """Maximum number of tokens in a scoring microbatch, including padding."""
    sequence_length_round: int = Field(default=8, ge=1)
    """Padded lengths are rounded up to a multiple of this number of tokens."""


class SequencePackingConfig(Section):
    """Microbatches of several rows packed into one sequence, with block-diagonal attention."""

    enabled: bool = False
    """Whether to pack rows, up to the token budgets below, instead of padding them."""
    train_mb_tokens: int = Field(default=4096, ge=1)
    """Maximum number of tokens in a training microbatch."""
    logprob_mb_tokens: int = Field(default=8192, ge=1)
    """Maximum number of tokens in a scoring microbatch."""
    algorithm: Literal["concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing"] = (
        "modified_first_fit_decreasing"
    )
    """Algorithm that packs rows into microbatches."""
    sequence_length_pad_multiple: int = Field(default=1, ge=1)
    """Pad each row to a multiple of this number of tokens."""


class GenerationConfig(ComponentSection):
    """Base section of every generation backend (`policy.generation`)."""

    transformers_keys: ClassVar[tuple[str, ...]] = ("do_sample", "pad_token_id")
    """Keys of a Transformers generation config that are accepted if they agree with what every engine does."""

    backend: str
    """Name of a registered generation backend, or the dotted path of its class."""
    model_name: Annotated[str | None, NAME_OR_PATH] = None
    """Name, `NAME@REVISION` or folder of the model, or a GGUF file; defaults to the policy's model."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Maximum number of tokens in one completion."""
    temperature: float = Field(default=1.0, gt=0.0)
    """Sampling temperature. Algorithms that sample score tokens at the same temperature; all others score at 1.0."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample from the smallest set of most likely tokens with a total probability of at least `top_p`."""
    top_k: int | None = Field(default=None, ge=1)
    """Sample from the `top_k` most likely tokens."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Sample from tokens with at least this fraction of the probability of the most likely token."""
    stop_strings: list[str] | None = None
    """Strings that end a completion. They are kept in the completion."""
    stop_token_ids: list[int] | None = None
    """Tokens that end a completion, in addition to the end-of-sequence token. They are kept in the completion."""
    eos_token_id: int | None = None
    """End-of-sequence token, for a config that repeats it: it must be one of the model's, which always end a completion."""
    val_temperature: float = Field(default=0.0, ge=0.0)
    """Sampling temperature in validation: 0 for greedy decoding, or equal to `temperature`. Other values are refused."""
    python: Annotated[str | None, NAME_OR_PATH] = None
    """Python interpreter that runs the workers, such as `venvs/sampler/bin/python`; that of the driver by default."""
    num_workers: int | None = Field(default=None, ge=1)
    """Number of engine replicas; defaults to the number of policy ranks."""
    resources: ResourcesConfig | None = None
    """The engine's own nodes, CPUs and GPUs, which determine the number of replicas. By default, the engine shares those of the
    policy (`cluster`)."""
    max_restarts: int = Field(default=3, ge=0)
    """Maximum number of dead workers to replace during a run. Their rows are sampled again. 0 disables restarts."""
    refit_buffer_mib: int = Field(default=512, ge=1)
    """Maximum amount of weights in transit at one time, in MiB."""
    refit_transport: str | None = None
    """Name of the weight transport; by default the cheapest that policy and engine both support, except `disk`."""
    refit_folder: Annotated[str | None, NAME_OR_PATH] = None
    """Folder for weights transferred by disk (`refit_transport: disk`). Policy and engine must both have access to it."""
    refit_canary: bool = True
    """Whether to compare the log-probabilities of a few sampled rows between engine and policy after the first refit, after a
    worker was restarted and, with `lora: adapter`, after 1, 2, 4, 8, ... steps, and stop the run if they differ. Required for
    engines that cannot compute digests of the tensors they compute with (vLLM), and done after every refit there."""
    canary_tolerance: float | None = Field(default=None, gt=0.0)
    """Maximum allowed mean difference of those log-probabilities, in nats per token. Defaults to 0.001 if both sides compute in
    float32; otherwise to 0.1 at the first sync, and then to 1.5 times the error of the first sync (0.1 with `lora: merged`)."""

    lora: Literal["adapter", "merged"] | None = None
    """What a refit sends of a policy that trains low-rank adapters. `adapter` sends the adapters, and the engine computes
    W x + s B A x as the policy does; `merged` sends W + s B A, rounded to the engine's data type, so updates smaller than its
    precision are lost. By default `adapter`, or `merged` if the engine or the kind of adapter does not support that."""

    @model_validator(mode="before")
    @classmethod
    def _accept_keys_that_agree(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not {*cls.transformers_keys} & given.keys():
            return given
        do_sample, pad = (given.get(key) for key in cls.transformers_keys)
        if do_sample not in (None, True):
            raise ValueError(
                f"do_sample is {do_sample!r}, but an engine samples unless it is called with greedy=True. Remove the key; "
                "validation is greedy with val_temperature: 0"
            )
        if pad not in (None, 0) or isinstance(pad, bool):
            raise ValueError(
                f"pad_token_id is {pad!r}, but completions are padded with 0, and their lengths say where the padding starts. "
                "Remove the key"
            )
        return {key: value for key, value in given.items() if key not in cls.transformers_keys}

    @model_validator(mode="after")
    def _validation_is_greedy_or_as_in_training(self) -> Self:
        if self.val_temperature not in (0.0, self.temperature):
            raise ValueError(
                f"val_temperature is {self.val_temperature}: set it to 0 (greedy) or to the training temperature "
                f"{self.temperature}, because an engine samples at one temperature"
            )
        return self

    def sampling_filters(self) -> dict[KeyPath, Any]:
        """Keys of this section that restrict sampling to some of the tokens, each with the value that disables it.

        They do not change the most likely token or its probability under the whole distribution.
        """
        neutral: dict[KeyPath, Any] = {("top_p",): 1.0, ("top_k",): None, ("min_p",): 0.0}
        return {key: value for key, value in neutral.items() if getattr(self, str(key[0])) != value}

    def logit_changes(self) -> dict[KeyPath, Any]:
        """Keys of this section that change logits other than by the temperature, each with the value that disables it.

        A backend with such keys (a repetition penalty, a logit bias) returns those that are set. No policy scores tokens under
        the changed distribution, so algorithms that train on samples reject them.
        """
        return {}

    @property
    def has_own_weights(self) -> bool:
        """Whether the engine (a remote server, a judge) has its own weights and never receives the policy's.

        A backend overrides it if that depends on its keys. Such an engine can be evaluated, but training that samples from the
        policy refuses it.
        """
        return False

    @property
    def weights_key(self) -> str | None:
        """Setting of the section with which an engine that has its own weights receives the policy's; None if there is none."""
        return None

    @property
    def sleeps(self) -> bool:
        """Whether the engine frees memory of its GPUs before a model needs it; read after `for_devices`."""
        return True

    def adapter_problem(self, policy: PolicyConfig) -> str | None:
        """Why this engine, which can compute with adapters, cannot do so for those of a policy; None if it can."""
        return None

    def image_problem(self, policy: PolicyConfig) -> str | None:
        """Why this engine, which can read images, cannot do so with the policy's model; None if it can."""
        return None

    def for_policy(self, policy: PolicyConfig) -> Self:
        """This section with unset values taken from the policy. Backends extend it with their own keys."""
        return self.model_copy(update={"model_name": self.model_name or policy.model_name})


class PolicyConfig(ComponentSection):
    """Base section of every policy backend (`policy`)."""

    backend: str
    """Name of a registered policy backend, or the dotted path of its class."""
    model_name: Annotated[str, NAME_OR_PATH]
    """Name, `NAME@REVISION` or folder of the model, or a GGUF file."""
    head: Literal["tokens", "scalar"] = "tokens"
    """Head of the model: `tokens` for next-token logits, `scalar` for one number per token (a value model or a reward
    model)."""
    frozen: bool = False
    """Whether the model is never trained, such as a teacher. A frozen model needs no memory for an optimizer and gradients."""
    vocab_size: int | None = Field(default=None, ge=1)
    """Number of tokens that a frozen model knows: rows of its LM head from this id on are unused, such as those that pad its
    vocabulary, and have probability 0. By default all rows are used, and of a teacher those that the policy has as well."""
    tokenizer: PolicyTokenizerConfig = Field(default_factory=PolicyTokenizerConfig)
    """Tokenizer; defaults to the one of the model."""
    precision: Literal["float32", "bfloat16"] | None = None
    """Data type of weights and activations. Optimizer state and log-probabilities are always float32. By default, bfloat16 on
    GPUs that all support it, otherwise float32; a resumed run keeps the type of its checkpoint. The policy computes float32
    without TF32."""
    max_total_sequence_length: int = Field(default=1024, ge=2)
    """Maximum number of tokens in a row: prompt and completion."""
    train_global_batch_size: int | None = Field(default=None, ge=1)
    """Number of rows per optimizer step over all ranks. By default, all rows of a step make one optimizer step."""
    train_micro_batch_size: int = Field(default=8, ge=1)
    """Number of rows per forward-backward pass on one rank, unless dynamic batching or sequence packing is enabled."""
    logprob_batch_size: int = Field(default=16, ge=1)
    """Number of rows per scoring pass on one rank, unless dynamic batching or sequence packing is enabled."""
    dynamic_batching: DynamicBatchingConfig = Field(default_factory=DynamicBatchingConfig)
    """Form microbatches with a token budget."""
    sequence_packing: SequencePackingConfig = Field(default_factory=SequencePackingConfig)
    """Form microbatches by packing several rows into one sequence."""
    shared_prefix: Literal["auto", "off"] = "auto"
    """Whether to compute the prompt of several rows only once, in scoring and training. `auto` does so if the backend and the
    model support it and it saves at least a tenth of the tokens; the log says what was chosen, and why."""
    activation_checkpointing: bool = False
    """Whether to recompute activations in the backward pass. Uses less memory and takes a third more time."""
    max_grad_norm: float | None = Field(default=1.0, gt=0.0)
    """Maximum norm of the gradient; larger gradients are clipped to it. null disables clipping."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """Optimizer."""
    scheduler: SchedulerConfig | None = None
    """Learning-rate schedule; the learning rate is constant by default."""
    generation: GenerationConfig | None = None
    """Generation backend. Required by algorithms that sample."""
    python: Annotated[str | None, NAME_OR_PATH] = None
    """Python interpreter that runs the workers; that of the driver by default."""

    @property
    def lora_rank(self) -> int | None:
        """Rank of the low-rank adapters that this policy trains; None if it trains other weights."""
        return None

    @property
    def adapter_problem(self) -> str | None:
        """Why these adapters can only be merged for a refit, with the key; None if they can be sent."""
        return None

    @property
    def scoring_temperature(self) -> float:
        """Temperature that the workers of this section divide logits by when they score tokens: that of `generation`."""
        return self.generation.temperature if self.generation is not None else 1.0

    @property
    def dtype_name(self) -> Literal["float32", "bfloat16"]:
        """`precision`. It is set for workers; without devices, such as in a conversion of files, it is float32."""
        return self.precision or "float32"

    @property
    def missing_reference(self) -> str | None:
        """Why the policy has no reference policy, as a clause; None if it has one.

        A backend without one overrides it: `rlcore validate` then refuses losses that need one.
        """
        return None

    @property
    def missing_average(self) -> str | None:
        """Why the policy has no moving average of its weights (`average_weights`), as a clause; None if it has one."""
        return f"the backend {self.backend} does not keep one"

    def for_devices(self, devices: Devices) -> Self:
        """This section with `precision`."""
        return self.model_copy(update={"precision": self.precision or ("bfloat16" if devices.have_bfloat16 else "float32")})

    def microbatch_limit(self, *, training: bool) -> tuple[str, int, int]:
        """The key that limits a microbatch, its value, and its smallest useful value: tokens with a token budget, else rows."""
        name = "sequence_packing" if self.sequence_packing.enabled else "dynamic_batching"
        budget: SequencePackingConfig | DynamicBatchingConfig = getattr(self, name)
        if not budget.enabled and training:
            return "train_micro_batch_size", self.train_micro_batch_size, 1
        if not budget.enabled:
            return "logprob_batch_size", self.logprob_batch_size, 1
        if training:
            return f"{name}.train_mb_tokens", budget.train_mb_tokens, self.max_total_sequence_length
        return f"{name}.logprob_mb_tokens", budget.logprob_mb_tokens, self.max_total_sequence_length

    def data_ranks(self, cluster: ClusterConfig) -> int:
        """Number of ranks that a batch is split over; lower for a backend that shards a model copy over several ranks."""
        return 1 if cluster.backend == "in_process" else cluster.num_nodes * cluster.workers_per_node

    @model_validator(mode="after")
    def _one_way_of_batching(self) -> PolicyConfig:
        if self.dynamic_batching.enabled and self.sequence_packing.enabled:
            raise ValueError("dynamic_batching and sequence_packing are mutually exclusive: enable one of them")
        return self

    @model_validator(mode="after")
    def _only_frozen_models_have_unused_rows(self) -> Self:
        if self.vocab_size is not None and not self.frozen:
            raise ValueError("vocab_size is only for a frozen model, such as a teacher: a trained one scores all of its tokens")
        return self


def rows_per_optimizer_step(rows: int, *, batch_size: int | None, multiple_of: int) -> int:
    """Number of rows of one optimizer step, including filler rows, so that each data-parallel rank has the same number.

    `batch_size` is `train_global_batch_size`; None means all rows at once.
    """
    return -(-(batch_size or rows) // multiple_of) * multiple_of


def constant(step: int, num_warmup_steps: int = 0) -> float:
    """1 after a linear warm-up."""
    return (step + 1) / (num_warmup_steps + 1) if step < num_warmup_steps else 1.0


def linear(step: int, num_training_steps: int, num_warmup_steps: int = 0) -> float:
    """Linear decay from 1 to 0, after a linear warm-up."""
    if step < num_warmup_steps:
        return constant(step, num_warmup_steps)
    return max(0.0, (num_training_steps - step) / max(1, num_training_steps - num_warmup_steps))


def cosine(step: int, num_training_steps: int, num_warmup_steps: int = 0, min_lr_ratio: float = 0.0) -> float:
    """Cosine decay from 1 to `min_lr_ratio` over half a period, after a linear warm-up."""
    if step < num_warmup_steps:
        return constant(step, num_warmup_steps)
    done = min(1.0, (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps))
    return min_lr_ratio + (1.0 - min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * done))


SCHEDULES: dict[str, Callable[..., float]] = {"constant": constant, "cosine": cosine, "linear": linear}
