"""The sections `policy` and `policy.generation` of the Transformers backend. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from pydantic import Field, model_validator

from rl_backends_hf.static_checks import model_problems, target_problems
from rl_core.config.schema import GenerationConfig, PolicyConfig, Section, TokenizerConfig
from rl_core.config.source_tree import KeyPath
from rl_core.plugins.requirements import unmet_needs

if TYPE_CHECKING:
    from rl_core.config.schema import RunSections

ALL_LINEAR: Final = "all-linear"
NEEDS_PEFT: Final = (
    "`policy.hf_cfg.lora` needs peft ({reason}). Install it with `pip install 'rl-backends-hf[lora]'`, or leave `lora` out to "
    "train all weights."
)


class HFModelConfig(Section):
    """How a Transformers model is loaded."""

    trust_remote_code: bool = False
    """Whether to run Python code that comes with the model."""
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2"] | None = None
    """Attention kernel; `sdpa` by default."""
    device_map: str | dict[str, Any] | None = None
    """`auto`, `cpu`, `cuda` or a device map of Transformers; defaults to the device of the rank."""
    load_in_8bit: bool = False
    """Whether to quantize frozen weights to 8 bits (bitsandbytes, GPU)."""
    load_in_4bit: bool = False
    """Whether to quantize frozen weights to 4 bits (bitsandbytes, GPU)."""
    config_overrides: dict[str, Any] = Field(default_factory=dict)
    """Fields of the model's config to replace, such as `attention_dropout`."""

    @model_validator(mode="after")
    def _check_quantization(self) -> HFModelConfig:
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("load_in_8bit and load_in_4bit cannot be combined: set only one of them")
        return self


_DEFAULTS: Final = HFModelConfig()
_OTHER_NAMES: Final = {
    "r": "rank",
    "dim": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
}
"""Names used by peft and others that a spelling suggestion would not find."""


class LoRAConfig(Section):
    """Low-rank adapters (LoRA, by peft): train small matrices added to frozen linear layers instead of all weights."""

    rank: int = Field(default=16, ge=1)
    """Rank of the adapters: the number of rows of A and columns of B in W + scale * B A. Called `r` in peft."""
    alpha: int = Field(default=32, ge=1)
    """Numerator of the scale, alpha / rank. Called `lora_alpha` in peft."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout probability of an adapter's inputs in training. Must be 0 for algorithms that sample from the policy."""
    target_modules: str | list[str] = ALL_LINEAR
    """Linear layers to adapt: a list of names or name suffixes (`[q_proj, v_proj]`), a regular expression for full names, or
    `all-linear`, which means all except the LM head."""
    exclude_modules: str | list[str] | None = None
    """Layers among `target_modules` to exclude; names or a regular expression, as in `target_modules`."""
    use_rslora: bool = False
    """Whether to use the scale alpha / sqrt(rank), so that large ranks learn as fast as small ones."""
    use_dora: bool = False
    """Whether to train magnitude and direction of weights separately (DoRA): slightly better, and slower."""
    seed: int = 0
    """Seed of the random initial matrix of each adapter."""

    @model_validator(mode="before")
    @classmethod
    def _reject_other_names(cls, given: Any) -> Any:
        for key in given if isinstance(given, dict) else ():
            if key in _OTHER_NAMES:
                raise ValueError(f"`{key}` is called `{_OTHER_NAMES[key]}` here")
            if key == "enabled":
                raise ValueError("there is no `enabled`: the section itself enables LoRA, and `lora: null` disables it")
        return given

    @model_validator(mode="after")
    def _check_target_modules(self) -> LoRAConfig:
        if not self.target_modules:
            raise ValueError(f"target_modules is empty, so nothing would be trained: name layers, or use {ALL_LINEAR!r}")
        return self


class HFConfig(HFModelConfig):
    """`policy.hf_cfg`."""

    data_parallel: Literal["replicate", "fsdp2"] = "replicate"
    """How ranks share the work: `replicate` keeps a whole copy of the model on each rank and sums gradients; `fsdp2` shards
    weights, gradients and optimizer state."""
    logprob_chunk_tokens: int = Field(default=1024, ge=1)
    """Number of positions for which the float32 logits of the LM head are in memory at one time."""
    reference: bool = True
    """Whether a reference policy is available: a frozen copy of the initial weights, made when it is first needed. With `lora`,
    the adapters are disabled instead."""
    lora: LoRAConfig | None = None
    """Train low-rank adapters with frozen base weights. By default, all weights are trained."""

    @model_validator(mode="after")
    def _check_lora(self) -> HFConfig:
        if self.lora is None:
            return self
        if self.data_parallel == "fsdp2":
            raise ValueError(
                "lora requires data_parallel: replicate, because each refit merges adapters into unsharded weights; the "
                "gradients and optimizer state that fsdp2 would shard are small with lora"
            )
        for key in ("load_in_4bit", "load_in_8bit"):
            if getattr(self, key):
                raise ValueError(
                    f"lora and {key} cannot be combined: a refit sends W + B A in full precision, which cannot be computed "
                    f"from a quantized W. Remove {key}; policy.precision: bfloat16 halves the memory of the base model"
                )
        return self


class HFPolicyConfig(PolicyConfig):
    """`policy` with `backend: hf`."""

    backend: str = "hf"
    """Name of a registered policy backend, or the dotted path of its class."""
    hf_cfg: HFConfig = Field(default_factory=HFConfig)
    """Settings specific to this backend."""

    def conflicts(self, run: RunSections) -> Iterator[tuple[KeyPath, str]]:
        """Report missing models and libraries, LoRA targets that do not exist in the model, and dropout in RL."""
        yield from model_problems(self.model_name, self.hf_cfg, same_environment=self.python is None)
        lora = self.hf_cfg.lora
        if lora is None:
            return
        at = ("hf_cfg", "lora")
        if self.python is None and (reason := unmet_needs(("peft>=0.21",))) is not None:
            yield at, NEEDS_PEFT.format(reason=reason)
        for key, problem in target_problems(self.model_name, lora.target_modules, lora.exclude_modules):
            yield (*at, key), problem
        if lora.dropout > 0 and run.algorithm.needs_generation and run.policy is self:
            yield (
                (*at, "dropout"),
                f"{run.algorithm_name} compares the training policy with the sampling policy. With dropout in one of them, "
                "their ratio is not 1 even before the first step. Set it to 0.",
            )

    def deep_conflicts(self, run: RunSections) -> Iterator[tuple[KeyPath, str]]:
        """Checks the model's config and class, the requirements for loading it on this machine, and LoRA targets."""
        from rl_backends_hf.model import length_dependent_rope, model_without_weights
        from rl_backends_hf.training.lora import check_targets

        if self.python is not None:
            return
        model = model_without_weights(self.model_name, options=self.hf_cfg, head=self.head)
        if self.hf_cfg.lora is not None:
            check_targets(model, self.hf_cfg.lora, head=self.head)
        if (problem := length_dependent_rope(model, self.max_total_sequence_length)) is not None:
            yield ("max_total_sequence_length",), problem


class HFSamplerConfig(HFModelConfig):
    """`policy.generation.hf_cfg`."""

    max_model_len: int | None = Field(default=None, ge=2)
    """Maximum number of tokens of prompt and completion; defaults to the smaller of the policy's and the model's limits."""
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    """Divide positive logits of tokens already in the row by this value, and multiply negative ones; 1 disables it. Algorithms
    that train on samples reject other values, since the policy scores tokens without the penalty."""
    max_batch_rows: int = Field(default=256, ge=1)
    """Maximum number of rows decoded together."""
    session_cache_mb: int = Field(default=1024, ge=0)
    """Memory limit, in MiB per replica, of the keys and values that are kept for conversations between their turns, so that a
    turn computes only its new tokens. The least recently used conversations are discarded first; 0 keeps none."""
    precision: Literal["float32", "bfloat16"] | None = None
    """Data type of the sampling copy; defaults to that of the policy."""
    tokenizer: TokenizerConfig | None = None
    """Tokenizer used to find stop strings; defaults to that of the policy."""
    seed: int = 0
    """Seed for rows that do not specify one."""


class HFGenerationConfig(GenerationConfig):
    """`policy.generation` with `backend: hf`."""

    backend: str = "hf"
    """Name of a registered generation backend, or the dotted path of its class."""
    hf_cfg: HFSamplerConfig = Field(default_factory=HFSamplerConfig)
    """Settings specific to this backend."""

    def conflicts(self, run: RunSections) -> Iterator[tuple[KeyPath, str]]:
        """Report missing models and libraries."""
        yield from super().conflicts(run)
        yield from model_problems(self.model_name, self.hf_cfg, same_environment=self.python is None)

    def logit_changes(self) -> dict[KeyPath, Any]:
        """The repetition penalty, if it is set."""
        own: dict[KeyPath, Any] = {} if self.hf_cfg.repetition_penalty == 1.0 else {("hf_cfg", "repetition_penalty"): 1.0}
        return super().logit_changes() | own

    def for_policy(self, policy: PolicyConfig) -> Self:
        """This section with unset values from the policy: model, loading options, data type, tokenizer and length."""
        own = self.hf_cfg
        bounds = [policy.max_total_sequence_length, own.max_model_len or policy.max_total_sequence_length]
        filled: dict[str, Any] = {
            "max_model_len": min(bounds),
            "precision": own.precision or policy.precision,
            "tokenizer": own.tokenizer or policy.tokenizer,
        }
        loaded_as = getattr(policy, "hf_cfg", None)
        if self.model_name is None and isinstance(loaded_as, HFModelConfig):
            shared_keys = ("trust_remote_code", "attn_implementation", "config_overrides")
            # Compared by value, because a resolved config contains all defaults and must mean the same.
            unset = {key for key in shared_keys if getattr(own, key) == getattr(_DEFAULTS, key)}
            filled.update({key: getattr(loaded_as, key) for key in unset})
        return super().for_policy(policy).model_copy(update={"hf_cfg": own.model_copy(update=filled)})
