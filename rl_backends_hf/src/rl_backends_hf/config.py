"""The sections `policy` and `policy.generation` of the Transformers backend; imports no torch."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rl_core.config.schema import GenerationConfig, PolicyConfig, Section, TokenizerConfig


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


class HFConfig(HFModelConfig):
    """`policy.hf_cfg`."""

    data_parallel: Literal["replicate", "fsdp2"] = "replicate"
    """How ranks share the work: whole copies with summed gradients, or sharded weights, gradients and optimizer."""
    logprob_chunk_tokens: int = Field(default=1024, ge=1)
    """Positions of which the LM head's logits exist at one time, in float32."""
    reference: bool = True
    """Keep a frozen copy of the initial weights once something asks for it."""


class HFPolicyConfig(PolicyConfig):
    """`policy` with `backend: hf`."""

    backend: str = "hf"
    hf_cfg: HFConfig = Field(default_factory=HFConfig)
    """What only this backend knows."""


class HFSamplerConfig(HFModelConfig):
    """`policy.generation.hf_cfg`."""

    max_model_len: int | None = Field(default=None, ge=2)
    """Most tokens of prompt and completion; the smaller of the policy's and the model's own limit by default."""
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    """Divide (or multiply) the logits of tokens already there; 1 leaves them."""
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
            filled.update({key: getattr(loaded_as, key) for key in taken if key not in own.model_fields_set})
        return super().for_policy(policy).model_copy(update={"hf_cfg": own.model_copy(update=filled)})
