"""The sections `policy` and `policy.generation` of the Transformers backend. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from pydantic import Field

from rl_backends_hf.model_options import NEEDS_PEFT, HFConfig, HFModelConfig
from rl_backends_hf.model_options import LoRAConfig as LoRAConfig
from rl_backends_hf.static_checks import model_problems
from rl_core.config.diagnostics import KeyPath
from rl_core.config.schema import GenerationConfig, PolicyConfig, TokenizerConfig
from rl_core.plugins.requirements import unmet_needs

if TYPE_CHECKING:
    from rl_core.config.schema import RunSections


class HFPolicyConfig(PolicyConfig):
    """`policy` with `backend: hf`."""

    backend: str = "hf"
    """Name of a registered policy backend, or the dotted path of its class."""
    hf_cfg: HFConfig = Field(default_factory=HFConfig)
    """Settings specific to this backend."""

    @property
    def own_sampler(self) -> HFGenerationConfig:
        """Settings of the policy's own sampler: those of `generation` that every backend has, if it selects another one."""
        if isinstance(self.generation, HFGenerationConfig) or self.generation is None:
            return self.generation or HFGenerationConfig()
        shared = set(GenerationConfig.model_fields) - {"backend"}
        return HFGenerationConfig(**{key: getattr(self.generation, key) for key in shared})

    @property
    def lora_rank(self) -> int | None:
        return None if self.hf_cfg.lora is None else self.hf_cfg.lora.rank

    @property
    def adapter_problem(self) -> str | None:
        lora, engine = self.hf_cfg.lora, self.generation
        if lora is not None and lora.use_dora:
            return "policy.hf_cfg.lora.use_dora also scales each row of the merged weight"
        if lora is not None and lora.target_parameters and engine is not None and engine.backend != "hf":
            return "only the engine `hf` computes with adapters of experts (policy.hf_cfg.lora.target_parameters)"
        return None

    @property
    def missing_reference(self) -> str | None:
        return None if self.hf_cfg.reference else "policy.hf_cfg.reference is false"

    @property
    def missing_average(self) -> str | None:
        return None

    def conflicts(self, run: RunSections) -> Iterator[tuple[KeyPath, str]]:
        """Report missing models and libraries, LoRA targets that do not exist in the model, and dropout in RL."""
        yield from model_problems(self, lambda: self.hf_cfg)
        shards = self.hf_cfg.fsdp_num_shards
        # Components created in Python bring their own cluster.
        if shards is not None and "cluster" in run.model_fields_set and (ranks := self.data_ranks(run.cluster)) % shards:
            yield (
                ("hf_cfg", "fsdp_num_shards"),
                f"{shards} ranks share one copy of the model, but the cluster has {ranks} rank(s). Use a divisor of {ranks}, "
                "or remove it to share one copy among all.",
            )
        if self.hf_cfg.cpu_products != "auto" and self.precision == "float32":
            yield (
                ("hf_cfg", "cpu_products"),
                f"{self.hf_cfg.cpu_products} has no effect with policy.precision: float32. Remove it, or use bfloat16.",
            )
        if self.hf_cfg.freeze and self.frozen:
            yield ("hf_cfg", "freeze"), "has no effect with frozen: true, which trains no weights. Remove one of them."
        if self.hf_cfg.lora is not None:
            yield from self._lora_conflicts(self.hf_cfg.lora, run)
        elif (key := self.hf_cfg.quantized_by) is not None and not self.frozen:
            yield (
                ("hf_cfg", key),
                "all weights are trained, but quantized weights have no gradients. Train adapters with hf_cfg.lora, or remove "
                f"{key}.",
            )

    def _lora_conflicts(self, lora: LoRAConfig, run: RunSections) -> Iterator[tuple[KeyPath, str]]:
        at = ("hf_cfg", "lora")
        if self.python is None and (reason := unmet_needs(("peft>=0.21",))) is not None:
            yield at, NEEDS_PEFT.format(reason=reason)
        for key, problem in lora.problems(self.model_name, head=self.head):
            yield (*at, key), problem
        if lora.autocast and self.precision == "float32":
            yield (
                (*at, "autocast"),
                f"requires policy.precision: bfloat16, but it is {self.precision}. Set it, or remove autocast.",
            )
        optimizers = [self.optimizer.name, *(group.name for group in self.optimizer.groups.values())]
        if lora.target_parameters and "torch.optim.Muon" in optimizers:
            yield (
                (*at, "target_parameters"),
                "Muon cannot update adapters of experts: those of all experts of a layer are one matrix, which it would update "
                "as a whole. Use torch.optim.AdamW, or adapt linear layers only.",
            )
        if lora.dropout > 0 and run.algorithm.needs_generation and run.policy is self:
            yield (
                (*at, "dropout"),
                f"{run.algorithm_name} compares the training policy with the sampling policy. With dropout in one of them, "
                "their ratio is not 1 even before the first step. Set it to 0.",
            )

    def deep_conflicts(self, run: RunSections) -> Iterator[tuple[KeyPath, str]]:
        """Checks the model's config and class, requirements for loading it on this machine, LoRA targets, optimizer groups."""
        from rl_backends_base.optimizer import build_optimizer
        from rl_backends_hf.lora_targets import check_targets, freeze_modules
        from rl_backends_hf.model import length_dependent_rope, model_without_weights
        from rl_backends_hf.quantized import layers_to_quantize

        if self.python is not None:
            return
        model = model_without_weights(self.model_name, options=self.hf_cfg, head=self.head)
        layers_to_quantize(model, self.hf_cfg)
        freeze_modules(model, self.hf_cfg.freeze)
        if self.hf_cfg.lora is not None:
            check_targets(model, self.hf_cfg.lora, head=self.head)
        if (problem := length_dependent_rope(model, self.max_total_sequence_length)) is not None:
            yield ("max_total_sequence_length",), problem
        # Adapters are only known once the worker has added them.
        if (
            not self.frozen
            and self.hf_cfg.lora is None
            and (self.optimizer.groups or self.optimizer.name == "torch.optim.Muon")
        ):
            trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
            build_optimizer(trained, self.optimizer)


_DEFAULTS: Final = HFModelConfig()


class HFSamplerConfig(HFModelConfig):
    """`policy.generation.hf_cfg`."""

    max_model_len: int | None = Field(default=None, ge=2)
    """Maximum number of tokens of prompt and completion; defaults to the smaller of the policy's and the model's limits."""
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    """Divide positive logits of tokens already in the row by this value, and multiply negative ones; 1 disables it. Algorithms
    that train on samples reject other values, since the policy scores tokens without the penalty."""
    max_batch_rows: int = Field(default=256, ge=1)
    """Maximum number of rows decoded together."""
    kv_cache_gib: float | None = Field(default=None, gt=0.0)
    """Memory limit, in GiB per replica, of the keys and values of the rows that are decoded together. Each row counts at its
    maximum length; further rows wait. By default, 80 % of the memory that is free on the GPU when sampling begins. There is no
    limit on a CPU."""
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

    @property
    def has_own_weights(self) -> bool:
        return self.hf_cfg.quantized_by is not None

    @property
    def weights_key(self) -> str | None:
        return f"hf_cfg.{self.hf_cfg.quantized_by}: false"

    def conflicts(self, run: RunSections) -> Iterator[tuple[KeyPath, str]]:
        """Report missing models and libraries."""
        yield from super().conflicts(run)
        yield from model_problems(self, lambda: self.hf_cfg)

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
            "precision": own.precision or policy.dtype_name,
            "tokenizer": own.tokenizer or policy.tokenizer,
        }
        loaded_as = getattr(policy, "hf_cfg", None)
        if self.model_name is None and isinstance(loaded_as, HFModelConfig):
            shared_keys = ("trust_remote_code", "attn_implementation", "config_overrides")
            # Compared by value, because a resolved config contains all defaults and must mean the same.
            unset = {key for key in shared_keys if getattr(own, key) == getattr(_DEFAULTS, key)}
            filled.update({key: getattr(loaded_as, key) for key in unset})
        return super().for_policy(policy).model_copy(update={"hf_cfg": own.model_copy(update=filled)})


def generation_advice(config: HFGenerationConfig, doing: str) -> str:
    """Which keys of the engine's section lower the memory of a phase, such as "sampling"."""
    hf, section = config.hf_cfg, "policy.generation.hf_cfg"
    if doing == "loading":
        return f"Set `{section}.precision: bfloat16`, or use a smaller model."
    kept = f", and `{section}.session_cache_mb` from {hf.session_cache_mb} to 0" if hf.session_cache_mb else ""
    return (
        f"Lower `{section}.max_batch_rows` from {hf.max_batch_rows} to {max(1, hf.max_batch_rows // 2)}{kept}, or set "
        f"`{section}.kv_cache_gib`."
    )
