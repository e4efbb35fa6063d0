"""How the Transformers backend loads a model, and its adapters (`hf_cfg`). Does not import torch."""

from __future__ import annotations

from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator

from rl_backends_base.adapter_folder import ALL_LINEAR
from rl_backends_base.lora_section import AdapterConfig
from rl_core.config.schema import Section

NEEDS_PEFT: Final = (
    "`policy.hf_cfg.lora` needs peft ({reason}). Install it with `pip install 'rl-backends-hf[lora]'`, or leave `lora` out to "
    "train all weights."
)


class QuantizationConfig(Section):
    """Details of `load_in_4bit`."""

    type: Literal["nf4", "fp4"] = "nf4"
    """The 16 values of 4 bits: `nf4`, quantiles of a normal distribution, or `fp4`, floating-point numbers."""
    double: bool = False
    """Whether to quantize the scales, too, one per 64 weights, which saves 0.37 bits per weight and costs accuracy."""


class HFModelConfig(Section):
    """How a Transformers model is loaded."""

    trust_remote_code: bool = False
    """Whether to run Python code that comes with the model."""
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2"] | None = None
    """Attention kernel; by default `sdpa`, or `eager` if the model's class has no SDPA or its config caps attention logits, as
    Gemma 2 does."""
    device_map: str | dict[str, Any] | None = None
    """`auto`, `cpu`, `cuda` or a device map of Transformers; defaults to the device of the rank. A map over several GPUs is
    refused."""
    load_in_8bit: bool = False
    """Whether to quantize linear layers, which are then frozen, to 8 bits (bitsandbytes). Train adapters with `lora`."""
    load_in_4bit: bool = False
    """Whether to quantize linear layers, which are then frozen, to 4 bits (bitsandbytes). Train adapters with `lora`."""
    quantization: QuantizationConfig = Field(default_factory=QuantizationConfig)
    """Details of `load_in_4bit`."""
    config_overrides: dict[str, Any] = Field(default_factory=dict)
    """Fields of the model's config to replace, such as `attention_dropout`."""

    @model_validator(mode="after")
    def _check_quantization(self) -> HFModelConfig:
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("load_in_8bit and load_in_4bit cannot be combined: set only one of them")
        if self.quantization != QuantizationConfig() and not self.load_in_4bit:
            raise ValueError("quantization has no effect without load_in_4bit: true. Set that, or remove quantization")
        return self

    @property
    def quantized_by(self) -> str | None:
        """The key that quantizes the weights, if one is set."""
        return next((key for key in ("load_in_4bit", "load_in_8bit") if getattr(self, key)), None)


class LoRAConfig(AdapterConfig):
    """Low-rank adapters (LoRA, by peft): train small matrices added to frozen linear layers instead of all weights."""

    target_modules: str | list[str] = ALL_LINEAR
    """Linear layers to adapt: a list of names or name suffixes (`[q_proj, v_proj]`), a regular expression for full names, or
    `all-linear`, which means all except the LM head. In a vision-language model, `all-linear` and names mean layers of the
    language model; layers of the vision tower are adapted if only they match a name."""
    target_parameters: list[str] = Field(default_factory=list)
    """Tensors that stack the experts of a layer to adapt: names or name suffixes (`[experts.gate_up_proj, experts.down_proj]`).
    Each expert has its own A and B. By default, experts stay frozen. Called the same in peft."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout probability of an adapter's inputs in training. Must be 0 for algorithms that sample from the policy."""
    use_dora: bool = False
    """Whether to train magnitude and direction of weights separately (DoRA): slightly better, and slower."""
    autocast: bool = False
    """Whether to compute adapters in the data type of the base (`torch.autocast`) instead of float32, which is faster on GPUs.
    Their weights, gradients and optimizer state stay float32. Requires `policy.precision: bfloat16`."""

    @model_validator(mode="after")
    def _check_target_modules(self) -> Self:
        if not self.target_modules and not self.target_parameters:
            raise ValueError(f"target_modules is empty, so nothing would be trained: name layers, or use {ALL_LINEAR!r}")
        return self

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        for key in ("use_dora", "dropout") if self.target_parameters else ():
            if getattr(self, key):
                raise ValueError(
                    f"{key} cannot be combined with target_parameters: peft, which defines the format of adapters, has neither "
                    f"for experts. Remove {key}, or adapt linear layers only"
                )
        return self


class HFConfig(HFModelConfig):
    """`policy.hf_cfg`."""

    data_parallel: Literal["replicate", "fsdp2"] = "replicate"
    """How ranks share the work: `replicate` keeps a whole copy of the model on each rank and sums gradients; `fsdp2` shards
    weights, gradients and optimizer state; with `lora`, it shards the frozen weights."""
    distributed_timeout_s: float = Field(default=1800.0, gt=0.0)
    """Timeout of collective operations between ranks, and of joining their process group, in seconds."""
    fsdp_num_shards: int | None = Field(default=None, ge=2)
    """With `fsdp2`, the number of consecutive ranks that share one copy of the model (HSDP), such as those of a node; all ranks
    by default. Fewer shards need more memory, and weights are gathered over fewer ranks."""
    fsdp_prefetched_layers: int = Field(default=0, ge=0)
    """With `fsdp2`, the number of layers whose weights are gathered in advance while another layer is computed, which hides a
    slow network and needs the memory of these layers. 0 leaves it to torch."""
    logprob_chunk_tokens: int = Field(default=1024, ge=1)
    """Number of positions for which the float32 logits of the LM head are in memory at one time."""
    compile_layers: bool = False
    """Whether to compile decoder layers with `torch.compile`, except their attention, which can make steps faster after minutes
    of compiling. Sampling is not compiled. Requires a C++ compiler on a CPU. Experimental: not run on GPUs."""
    cpu_products: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type in which a policy on a CPU multiplies bfloat16 matrices; weights, results of products and transfers are
    bfloat16 in any case. `auto` is `bfloat16` if the CPU has AVX512-BF16, AMX or BF16 of ARM. Others emulate it, so `auto` is
    `float32` there, which is several times faster. The log-probabilities are those of CPUs with these instructions, up to
    the order of float32 sums. Other values than `auto` require `policy.precision: bfloat16` and a CPU."""
    reference: bool = True
    """Whether a reference policy is available: a frozen copy of the initial weights, made when it is first needed. With `lora`,
    the adapters are disabled instead."""
    lora: LoRAConfig | None = None
    """Train low-rank adapters with frozen base weights. By default, all weights are trained."""
    freeze: list[str] = Field(default_factory=list)
    """Modules whose weights are not trained: names or name suffixes, such as `[visual]` for the vision tower of Qwen2.5-VL, in
    which `*` matches any text. They have neither gradients nor optimizer state. By default, all weights are trained."""

    @model_validator(mode="after")
    def _check_freeze(self) -> HFConfig:
        if self.freeze and self.lora is not None:
            raise ValueError("freeze has no effect with lora, which freezes all weights of the base. Remove freeze")
        return self

    @model_validator(mode="after")
    def _check_compiled_experts(self) -> HFConfig:
        if self.compile_layers and self.lora is not None and self.lora.target_parameters:
            raise ValueError(
                "compile_layers cannot be combined with lora.target_parameters: torch does not compile what replaces the "
                "tensors of experts. Remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_fsdp(self) -> HFConfig:
        for key in ("fsdp_num_shards", "fsdp_prefetched_layers"):
            if getattr(self, key) and self.data_parallel != "fsdp2":
                raise ValueError(f"{key} has no effect without data_parallel: fsdp2. Set that, or remove {key}")
        if self.data_parallel == "replicate":
            return self
        if self.lora is not None and self.lora.use_dora:
            raise ValueError(
                "lora.use_dora requires data_parallel: replicate, because its magnitudes start as norms of whole weights, of "
                "which fsdp2 gives each rank a shard"
            )
        if self.quantized_by is not None:
            raise ValueError(
                f"{self.quantized_by} requires data_parallel: replicate, because fsdp2 cannot shard quantized weights"
            )
        return self
