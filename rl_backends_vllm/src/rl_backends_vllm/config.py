"""The section `policy.generation` with `backend: vllm`. Imports neither torch nor vLLM.

The names of vLLM's engine arguments are parsed from its source: importing vLLM would add six seconds to `rlcore validate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, Field, model_validator

from rl_backends_vllm.sources import IMAGE_FAMILIES, known_engine_arguments, why_no_images, why_not_adapted
from rl_core.config.diagnostics import KeyPath
from rl_core.config.schema import GenerationConfig, PolicyConfig, Section, TokenizerConfig
from rl_core.config.section import Devices, model_path_problem
from rl_core.errors import ConfigError
from rl_core.plugins.component import did_you_mean

if TYPE_CHECKING:
    from rl_core.config.schema import RunSections


_MIN_TEMPERATURE = 0.01

CPU_ROWS = 256
"""Default of `max_num_seqs` on a CPU."""

LoraRank = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]
"""Values of `max_lora_rank` that vLLM accepts."""


class NgramSpeculation(Section):
    """`policy.generation.vllm_cfg.ngram_speculation`."""

    num_speculative_tokens: int = Field(ge=1, le=128)
    """Maximum number of tokens that are proposed for a row per engine step."""
    prompt_lookup_max: int = Field(default=5, ge=1)
    """Maximum number of a row's last tokens that are looked up in its earlier tokens."""
    prompt_lookup_min: int = Field(default=2, ge=1)
    """Minimum number of these tokens; if so few do not occur earlier, nothing is proposed."""

    @model_validator(mode="after")
    def _check_lookup(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(f"prompt_lookup_min {self.prompt_lookup_min} exceeds prompt_lookup_max {self.prompt_lookup_max}")
        return self


class VllmEngineConfig(Section):
    """`policy.generation.vllm_cfg`."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Tensor parallelism: number of processes that share each layer of a replica."""
    pipeline_parallel_size: int = Field(default=1, ge=1)
    """Pipeline parallelism: number of processes that the layers of a replica are divided over."""
    gpu_memory_utilization: float = Field(default=0.6, gt=0.0, le=1.0)
    """Fraction of GPU memory to use for weights, activations and KV cache. On a CPU, `kv_cache_gib` is used instead."""
    kv_cache_gib: float | None = Field(default=None, gt=0.0)
    """Size of the KV cache in GiB. By default, what `gpu_memory_utilization` leaves on a GPU; on a CPU, enough for all rows at
    full length, but at most 1 GiB."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Maximum number of tokens of prompt and completion; defaults to the policy's `max_total_sequence_length` or the model's
    limit."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Maximum number of rows decoded together. By default, 256 on a CPU, and on a GPU what vLLM chooses for its memory."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens per engine step; chosen by vLLM by default."""
    enforce_eager: bool | None = None
    """Whether to disable compilation and graph capture. By default, true on a CPU, where compiling takes a minute, and false on
    a GPU."""
    enable_prefix_caching: bool = True
    """Whether to compute a common prefix of prompts, such as the prompt of a group, only once."""
    ngram_speculation: NgramSpeculation | None = None
    """Speculative decoding: what followed the row's last tokens where they occurred first is proposed, and the model accepts or
    replaces it. Rows that repeat themselves or their prompt need fewer engine steps, and are drawn from the same distribution.
    Requires `temperature: 1`. Off by default."""
    precision: Literal["float32", "bfloat16", "float16"] | None = None
    """Data type of weights and activations; defaults to that of the policy."""
    kv_cache_dtype: str = "auto"
    """Data type of the KV cache, such as `fp8`; `auto` is the engine's own."""
    load_format: str | None = None
    """`auto` loads the model's weights; `dummy` skips them, because the policy sends its own. Defaults to `dummy` in a run,
    which sends all weights with its first refit, and to `auto` otherwise."""
    max_lora_rank: LoraRank | None = None
    """Maximum rank of low-rank adapters, for which vLLM reserves memory. By default, the rank of the policy's adapters, rounded
    up to one of these, if refits send adapters (`policy.generation.lora: adapter`); otherwise vLLM runs without adapters."""
    trust_remote_code: bool = False
    """Whether to run Python code that comes with the model."""
    tokenizer: TokenizerConfig | None = None
    """Tokenizer used to find stop strings; defaults to that of the policy."""
    seed: int = 0
    """Seed for rows that do not specify one."""
    async_engine: bool = False
    """Whether to run the engine core in a separate process, so that scheduling overlaps with processing finished rows."""
    sleep_level: Literal[0, 1, 2] | None = None
    """What the engine frees on a GPU before the policy needs its memory: nothing, so that both stay on the GPU (0); the
    KV cache, with weights moved to host memory (1); or both (2), so that the next refit sends all weights. By default, 2 in
    training, and 0 otherwise. It has no effect on a CPU, nor with `rollout.max_staleness` above 0, where rows continue during
    training."""

    @model_validator(mode="after")
    def _check_batched_tokens(self) -> Self:
        batched, rows = self.max_num_batched_tokens, self.max_num_seqs
        if batched is not None and rows is not None and batched < rows:
            raise ValueError(
                f"max_num_batched_tokens {batched} is less than max_num_seqs {rows}: each row needs a token per engine step"
            )
        return self

    @property
    def processes(self) -> int:
        """Number of processes of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


def _engine_argument(name: str) -> str:
    """Validate a key of `vllm_kwargs`. Applied to the key, so that an error shows its line."""
    known = known_engine_arguments()
    if name in OWNED:
        raise ValueError(f"vllm_kwargs cannot set {name}: {OWNED[name]}")
    if known and name not in known:
        raise ValueError(f"vLLM's EngineArgs has no {name!r}.{did_you_mean(name, sorted(known))}")
    return name


class VllmConfig(GenerationConfig):
    """`policy.generation` with `backend: vllm`."""

    backend: str = "vllm"
    """Name of a registered generation backend, or the dotted path of its class."""
    vllm_cfg: VllmEngineConfig = Field(default_factory=VllmEngineConfig)
    """Settings specific to this backend."""
    vllm_kwargs: dict[Annotated[str, AfterValidator(_engine_argument)], Any] = Field(default_factory=dict)
    """Any other argument of vLLM's `EngineArgs`, by its name there."""

    @model_validator(mode="after")
    def _check_temperature(self) -> Self:
        if self.temperature < _MIN_TEMPERATURE:
            raise ValueError(
                f"temperature {self.temperature:g} is too small: vLLM would sample at {_MIN_TEMPERATURE:g}, but training would "
                f"score the tokens at {self.temperature:g}. Set it to at least {_MIN_TEMPERATURE:g}"
            )
        if self.vllm_cfg.ngram_speculation is not None and self.temperature != 1.0:
            raise ValueError(
                f"vllm_cfg.ngram_speculation requires temperature 1, not {self.temperature:g}: with speculation, vLLM reports "
                "log-probabilities of greedy rows at temperature 1 only. Set temperature: 1.0, or leave speculation out"
            )
        return self

    def conflicts(self, run: RunSections) -> Iterator[tuple[KeyPath, str]]:
        """Report a model that does not exist."""
        yield from super().conflicts(run)
        if self.model_name is not None and (problem := model_path_problem(self.model_name)) is not None:
            yield ("model_name",), problem

    @property
    def sleeps(self) -> bool:
        return self.vllm_cfg.sleep_level != 0

    def for_devices(self, devices: Devices) -> Self:
        """This section with `sleep_level`, `enforce_eager` and, on CPUs, `max_num_seqs`."""
        own, on_cpu = self.vllm_cfg, not devices.use_gpus
        defaults = {
            # Level 2 discards the frozen weights as well, which each refit would have to send again.
            "sleep_level": (1 if self.lora == "adapter" else 2) if devices.use_gpus and devices.trains else 0,
            "enforce_eager": on_cpu,
            "max_num_seqs": CPU_ROWS if on_cpu else None,
        }
        unset = {key: value for key, value in defaults.items() if getattr(own, key) is None}
        return self.model_copy(update={"vllm_cfg": own.model_copy(update=unset)})

    def adapter_problem(self, policy: PolicyConfig) -> str | None:
        own, rank = self.vllm_cfg, policy.lora_rank or 0
        largest = own.max_lora_rank or max(get_args(LoraRank))
        if rank > largest:
            return f"the adapters have rank {rank}, and this engine's maximum (vllm_cfg.max_lora_rank) is {largest}"
        if own.ngram_speculation is not None:
            return "vllm_cfg.ngram_speculation was not tested with adapters"
        if own.pipeline_parallel_size > 1:
            return f"vllm_cfg.pipeline_parallel_size is {own.pipeline_parallel_size}, and its stages receive no adapters"
        hf_config = self._hf_config(policy)
        if hf_config is not None and hf_config.model_type in IMAGE_FAMILIES:
            return "adapters of vision-language models were not tested with vLLM"
        return None if hf_config is None else why_not_adapted(hf_config)

    def reads_images(self, hf_config: Any) -> bool:
        """Whether rows of the model of a Transformers configuration may have images."""
        return self._image_problem(hf_config) is None

    def image_problem(self, policy: PolicyConfig) -> str | None:
        hf_config = self._hf_config(policy)
        return None if hf_config is None else self._image_problem(hf_config)

    def _image_problem(self, hf_config: Any) -> str | None:
        if self.vllm_cfg.ngram_speculation is not None:
            return "vllm_cfg.ngram_speculation was not tested with images"
        implementation = self.vllm_kwargs.get("model_impl", "transformers")
        if (problem := why_no_images(hf_config.model_type)) is None and implementation != "transformers":
            return f"vllm_kwargs.model_impl is {implementation}, and images require `transformers`, the default of such models"
        return problem

    def _hf_config(self, policy: PolicyConfig) -> Any:
        from rl_backends_vllm.model_folder import read_config

        try:
            return read_config(self.model_name or policy.model_name, trust_remote_code=self._trusts_code(policy))
        except ConfigError:  # reported elsewhere
            return None

    def for_policy(self, policy: PolicyConfig) -> Self:
        """This section with unset values from the policy (model, data type, tokenizer, length). Weights are not loaded."""
        own = self.vllm_cfg
        filled: dict[str, Any] = {
            "max_model_len": min(own.max_model_len or policy.max_total_sequence_length, policy.max_total_sequence_length),
            "precision": own.precision or policy.dtype_name,
            "tokenizer": own.tokenizer or policy.tokenizer,
            "load_format": own.load_format or "dummy",
            "max_lora_rank": own.max_lora_rank or self._lora_rank(policy),
            "trust_remote_code": self._trusts_code(policy),
        }
        return super().for_policy(policy).model_copy(update={"vllm_cfg": own.model_copy(update=filled)})

    def _trusts_code(self, policy: PolicyConfig) -> bool:
        loaded_as = getattr(policy, f"{policy.backend}_cfg", None)
        return self.vllm_cfg.trust_remote_code or bool(getattr(loaded_as, "trust_remote_code", False))

    def _lora_rank(self, policy: PolicyConfig) -> int | None:
        rank = policy.lora_rank if self.lora == "adapter" else None
        return None if rank is None else next((known for known in get_args(LoraRank) if known >= rank), None)


_CFG = "set policy.generation.vllm_cfg.{} instead."
_SAME_NAME = (
    "enable_prefix_caching",
    "enforce_eager",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "load_format",
    "max_lora_rank",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "pipeline_parallel_size",
    "seed",
    "tensor_parallel_size",
    "trust_remote_code",
)
_REPLICAS = (
    "data_parallel_address",
    "data_parallel_backend",
    "data_parallel_external_lb",
    "data_parallel_hybrid_lb",
    "data_parallel_multi_port_external_lb",
    "data_parallel_rank",
    "data_parallel_rpc_port",
    "data_parallel_size",
    "data_parallel_size_local",
    "data_parallel_start_rank",
    "elastic_ep_max_dp_size",
    "enable_elastic_ep",
)
_PROCESSES = ("device_ids", "distributed_executor_backend", "master_addr", "master_port", "nnodes", "node_rank", "worker_cls")
_OTHER_CACHES = ("ec_transfer_config", "kv_offloading_backend", "kv_offloading_size", "kv_transfer_config")
_OTHER_WEIGHTS = (
    "allow_deprecated_quantization",
    "cpu_offload_gb",
    "cpu_offload_params",
    "enable_ep_weight_filter",
    "enable_eplb",
    "enable_expert_parallel",
    "eplb_config",
    "offload_backend",
    "offload_group_size",
    "offload_num_in_group",
    "offload_params",
    "offload_prefetch_step",
    "quantization",
    "quantization_config",
)
_WITHOUT_EFFECT = (
    "additional_config",
    "aux_output_config",
    "enable_mm_embeds",
    "enable_prompt_embeds",
    "enable_return_routed_experts",
    "enable_trace_replay",
    "io_processor_plugin",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "return_sampling_mask",
    "served_model_name",
    "weight_transfer_config",
)
OWNED = {
    "model": "set policy.generation.model_name instead.",
    **dict.fromkeys(("revision", "tokenizer_revision"), "append it to the model's name: NAME@REVISION."),
    "dtype": _CFG.format("precision"),
    "tokenizer": _CFG.format("tokenizer"),
    "kv_cache_memory_bytes": _CFG.format("kv_cache_gib"),
    "enable_sleep_mode": _CFG.format("sleep_level"),
    "structured_outputs_config": "other backends ignore some keywords of a JSON schema.",
    "logprobs_mode": "log-probabilities are always those of the sampling distribution.",
    "worker_extension_cls": "refits use it.",
    "generation_config": "policy.generation and the model's end tokens determine sampling.",
    "override_generation_config": "policy.generation determines sampling; see stop_token_ids and temperature there.",
    **dict.fromkeys(
        ("logits_processors", "watermark_config"), "training could not score the tokens under the sampling distribution."
    ),
    **dict.fromkeys(
        ("spec_method", "spec_model", "spec_tokens", "speculative_config"),
        _CFG.format("ngram_speculation") + " Refits do not reach the weights of a draft model, which would stay random.",
    ),
    **dict.fromkeys(_OTHER_CACHES, "after a refit, what is stored outside the engine would still be that of older weights."),
    **dict.fromkeys(
        _OTHER_WEIGHTS, "refits were not tested with weights that are stored in another form, elsewhere, or per expert."
    ),
    **dict.fromkeys(_PROCESSES, "rlcore starts and places the processes of the engine."),
    **dict.fromkeys(
        ("convert", "diffusion_config", "mm_encoder_only", "pooler_config", "runner"), "the engine samples tokens."
    ),
    **dict.fromkeys(_WITHOUT_EFFECT, "rlcore does not use it."),
    **dict.fromkeys(("hf_config_path", "model_weights"), "set policy.generation.model_name instead."),
    "skip_tokenizer_init": "it is set automatically if the model has no tokenizer.",
    "enable_chunked_prefill": "it depends on the device: on a CPU, vLLM does not support it for rows with seeds.",
    "disable_log_stats": "engine statistics are part of the run's metrics.",
    "enable_lora": "set policy.generation.lora, or vllm_cfg.max_lora_rank.",
    **dict.fromkeys(("max_loras", "max_cpu_loras"), "there is one adapter, that of the policy."),
    "lora_dtype": "adapters are float32 on a CPU, and of the engine's data type on a GPU, where vLLM has no others.",
    **{name: _CFG.format(name) for name in _SAME_NAME},
    **dict.fromkeys(_REPLICAS, "each replica is one engine; set policy.generation.num_workers to run several."),
}
"""Arguments that `vllm_kwargs` cannot set, and what to do instead."""
