"""The sections `policy` and `policy.generation` of the Transformers backend; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from pydantic import Field, model_validator

from rl_backends_hf.static_checks import model_problems, target_problems
from rl_core.config.schema import GenerationConfig, PolicyConfig, Section, TokenizerConfig
from rl_core.config.written import Path
from rl_core.plugins.requirements import unmet_needs

if TYPE_CHECKING:
    from rl_core.config.schema import RunConfig

ALL_LINEAR: Final = "all-linear"
NEEDS_PEFT: Final = (
    "`policy.hf_cfg.lora` needs peft ({reason}). Install it with `pip install 'rl-backends-hf[lora]'`, or leave `lora` out to "
    "train all weights."
)


class HFModelConfig(Section):
    """How a model of Transformers is loaded."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2"] | None = None
    """Attention kernel; `sdpa` by default."""
    device_map: str | dict[str, Any] | None = None
    """`auto`, `cpu`, `cuda` or a map of Transformers; the rank's own device by default."""
    load_in_8bit: bool = False
    """Quantise frozen weights to 8 bits (bitsandbytes, GPU)."""
    load_in_4bit: bool = False
    """Quantise frozen weights to 4 bits (bitsandbytes, GPU)."""
    config_overrides: dict[str, Any] = Field(default_factory=dict)
    """Fields of the model's own config to replace, such as `attention_dropout`."""

    @model_validator(mode="after")
    def _one_quantisation(self) -> HFModelConfig:
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("load_in_8bit and load_in_4bit exclude each other: keep one of them")
        return self


_DEFAULTS: Final = HFModelConfig()
_NAMES_ELSEWHERE: Final = {
    "r": "rank",
    "dim": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
}
"""What peft and others call our keys: too far apart for a comparison of spellings."""


class LoRAConfig(Section):
    """Low-rank adapters: small matrices beside frozen linear layers are trained in place of all weights (by peft)."""

    rank: int = Field(default=16, ge=1)
    """Rows of A and columns of B, of which W + scale * B A is made; peft's `r`."""
    alpha: int = Field(default=32, ge=1)
    """The scale is alpha / rank; peft's `lora_alpha`."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of an adapter's inputs that is dropped in training; 0 for algorithms that sample from the policy."""
    target_modules: str | list[str] = ALL_LINEAR
    """Names of linear layers or their ends (`[q_proj, v_proj]`), one expression for whole names, or `all-linear`: all but the
    LM head."""
    exclude_modules: str | list[str] | None = None
    """Which of those stay without an adapter; names or an expression, as in `target_modules`."""
    use_rslora: bool = False
    """The scale is alpha / sqrt(rank), so that a large rank learns as fast as a small one."""
    use_dora: bool = False
    """Train the length of each output's weights apart from their direction: a little better, and slower."""
    seed: int = 0
    """Seed of the random matrix that each adapter begins with."""

    @model_validator(mode="before")
    @classmethod
    def _known_by_other_names(cls, given: Any) -> Any:
        for key in given if isinstance(given, dict) else ():
            if key in _NAMES_ELSEWHERE:
                raise ValueError(f"`{key}` is called `{_NAMES_ELSEWHERE[key]}` here")
            if key == "enabled":
                raise ValueError("there is no `enabled`: the section itself switches LoRA on, and `lora: null` off")
        return given

    @model_validator(mode="after")
    def _adapts_something(self) -> LoRAConfig:
        if not self.target_modules:
            raise ValueError(f"target_modules is empty, so nothing would train: name layers, or leave it at {ALL_LINEAR!r}")
        return self


class HFConfig(HFModelConfig):
    """`policy.hf_cfg`."""

    data_parallel: Literal["replicate", "fsdp2"] = "replicate"
    """How ranks share the work: whole copies with summed gradients, or sharded weights, gradients and optimizer."""
    logprob_chunk_tokens: int = Field(default=1024, ge=1)
    """Positions of which the LM head's logits exist at one time, in float32."""
    reference: bool = True
    """Keep a frozen copy of the initial weights once something asks for it; under `lora`, allow adapters to be switched off."""
    lora: LoRAConfig | None = None
    """Train low-rank adapters beside frozen weights; all weights by default."""

    @model_validator(mode="after")
    def _lora_on_whole_plain_weights(self) -> HFConfig:
        if self.lora is None:
            return self
        if self.data_parallel == "fsdp2":
            raise ValueError(
                "lora needs data_parallel: replicate, since adapters are merged into whole weights at each refit; the "
                "gradients and optimizer state that fsdp2 would shard are small under lora"
            )
        for key in ("load_in_4bit", "load_in_8bit"):
            if getattr(self, key):
                raise ValueError(
                    f"lora and {key} exclude each other: a refit hands on W + B A in full precision, and a W that is rounded "
                    f"to integers cannot be summed so. Remove {key}; policy.precision: bfloat16 halves the memory of the base"
                )
        return self


class HFPolicyConfig(PolicyConfig):
    """`policy` with `backend: hf`."""

    backend: str = "hf"
    hf_cfg: HFConfig = Field(default_factory=HFConfig)
    """What only this backend knows."""

    def conflicts(self, run: RunConfig) -> Iterator[tuple[Path, str]]:
        """A model that is not there, libraries that are not installed, LoRA targets that the model lacks, dropout in RL."""
        yield from model_problems(self.model_name, self.hf_cfg, is_here=self.python is None)
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
                f"{run.algorithm_name} compares the policy that trains with the one that sampled. Those would be two models: "
                "with dropout and without, so their ratio is not 1 even before the first step. Set it to 0.",
            )

    def deep_conflicts(self, run: RunConfig) -> Iterator[tuple[Path, str]]:
        """The model's config and class, what the loading needs of this machine, and LoRA's targets."""
        from rl_backends_hf.lora import check_targets
        from rl_backends_hf.model import model_without_weights

        if self.python is not None:
            return
        model = model_without_weights(self.model_name, options=self.hf_cfg, head=self.head)
        if self.hf_cfg.lora is not None:
            check_targets(model, self.hf_cfg.lora, head=self.head)
        yield from ()


class HFSamplerConfig(HFModelConfig):
    """`policy.generation.hf_cfg`."""

    max_model_len: int | None = Field(default=None, ge=2)
    """Most tokens of prompt and completion; the smaller of the policy's and the model's own limit by default."""
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    """Divide positive logits of tokens that the row already holds by it, and multiply negative ones; 1 changes nothing.
    Algorithms that train on samples refuse any other value, since the policy scores tokens without it."""
    max_batch_rows: int = Field(default=256, ge=1)
    """Rows decoded together."""
    precision: Literal["float32", "bfloat16"] | None = None
    """Type of the sampling copy; the policy's by default."""
    tokenizer: TokenizerConfig | None = None
    """What reads text for stop strings; the policy's by default."""
    seed: int = 0
    """Seed of rows that bring none of their own."""


class HFGenerationConfig(GenerationConfig):
    """`policy.generation` with `backend: hf`."""

    backend: str = "hf"
    hf_cfg: HFSamplerConfig = Field(default_factory=HFSamplerConfig)
    """What only this backend knows."""

    def conflicts(self, run: RunConfig) -> Iterator[tuple[Path, str]]:
        """A model that is not there, and libraries that are not installed."""
        yield from super().conflicts(run)
        yield from model_problems(self.model_name, self.hf_cfg, is_here=self.python is None)

    def logit_changes(self) -> dict[Path, Any]:
        """The repetition penalty, where there is one."""
        own: dict[Path, Any] = {} if self.hf_cfg.repetition_penalty == 1.0 else {("hf_cfg", "repetition_penalty"): 1.0}
        return super().logit_changes() | own

    def for_policy(self, policy: PolicyConfig) -> Self:
        """This section with what it leaves open taken from the policy: model, how it is loaded, type, tokenizer, length."""
        own = self.hf_cfg
        bounds = [policy.max_total_sequence_length, own.max_model_len or policy.max_total_sequence_length]
        filled: dict[str, Any] = {
            "max_model_len": min(bounds),
            "precision": own.precision or policy.precision,
            "tokenizer": own.tokenizer or policy.tokenizer,
        }
        loaded_as = getattr(policy, "hf_cfg", None)
        if self.model_name is None and isinstance(loaded_as, HFModelConfig):
            taken = ("trust_remote_code", "attn_implementation", "config_overrides")
            # By value: a resolved config states every default, and must mean the same.
            unset = {key for key in taken if getattr(own, key) == getattr(_DEFAULTS, key)}
            filled.update({key: getattr(loaded_as, key) for key in unset})
        return super().for_policy(policy).model_copy(update={"hf_cfg": own.model_copy(update=filled)})
