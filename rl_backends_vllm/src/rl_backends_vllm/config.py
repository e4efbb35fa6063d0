"""The section `policy.generation` with `backend: vllm`; imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from rl_backends_vllm.engine_arguments import OWNED, known_engine_arguments
from rl_core.config.model_paths import model_path_problem
from rl_core.config.schema import GenerationConfig, PolicyConfig, Section, TokenizerConfig
from rl_core.config.written import Path
from rl_core.plugins.component import did_you_mean

if TYPE_CHECKING:
    from rl_core.config.schema import RunConfig

_LEAST_TEMPERATURE = 0.01


class VllmEngineConfig(Section):
    """`policy.generation.vllm_cfg`."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Processes that share each layer of one replica."""
    pipeline_parallel_size: int = Field(default=1, ge=1)
    """Processes that share the layers of one replica."""
    gpu_memory_utilization: float = Field(default=0.6, gt=0.0, le=1.0)
    """Share of a GPU's memory for weights, activations and KV cache; on a CPU `kv_cache_gib` decides."""
    kv_cache_gib: float | None = Field(default=None, gt=0.0)
    """Size of the KV cache in GiB; on a GPU what `gpu_memory_utilization` leaves, on a CPU room for all rows at full length,
    one GiB at most."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Most tokens of prompt and completion; the policy's `max_total_sequence_length`, or the model's limit, by default."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Rows decoded together."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Tokens computed together; vLLM's choice by default."""
    enforce_eager: bool | None = None
    """Neither compile nor capture graphs; by default so on a CPU, where compiling takes a minute, and not on a GPU."""
    enable_prefix_caching: bool = True
    """Prompts that begin alike, such as the rows of a group, are computed once."""
    precision: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of weights and activations; the policy's by default."""
    kv_cache_dtype: str = "auto"
    """Type of the KV cache, such as `fp8`; `auto` is the engine's own."""
    load_format: str | None = None
    """`auto` reads the model's weights, `dummy` waits for the policy's. By default `dummy` in a run, whose first refit brings
    all weights, and `auto` outside of one."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    tokenizer: TokenizerConfig | None = None
    """What reads text for stop strings; the policy's by default."""
    seed: int = 0
    """Seed of rows that bring none of their own."""
    async_engine: bool = False
    """Run the engine's core in a process of its own: scheduling overlaps with what is done with finished rows."""
    in_flight: Literal["recompute", "restart"] = "recompute"
    """Rows that are under way at a refit: keep their tokens and compute their keys and values anew, or sample them again from
    the start."""
    sleep_level: Literal[0, 1, 2] = 0
    """What `finish_generation` frees on a GPU: nothing (0), the KV cache, with weights moved to the host (1), or both (2). On
    a CPU it does nothing."""

    @model_validator(mode="after")
    def _a_token_for_each_row(self) -> Self:
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}: each row "
                "that is decoded needs a token"
            )
        return self

    @property
    def processes(self) -> int:
        """Processes of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


def _engine_argument(name: str) -> str:
    """A name that `vllm_kwargs` may hold; of a key, so that the error has the key's own line."""
    known = known_engine_arguments()
    if name in OWNED:
        raise ValueError(f"vllm_kwargs cannot set {name}: {OWNED[name]}")
    if known and name not in known:
        raise ValueError(f"vLLM's EngineArgs has no {name!r}.{did_you_mean(name, sorted(known))}")
    return name


class VllmConfig(GenerationConfig):
    """`policy.generation` with `backend: vllm`."""

    backend: str = "vllm"
    vllm_cfg: VllmEngineConfig = Field(default_factory=VllmEngineConfig)
    """What only this backend knows."""
    vllm_kwargs: dict[Annotated[str, AfterValidator(_engine_argument)], Any] = Field(default_factory=dict)
    """Any further argument of vLLM's `EngineArgs`, by its name there."""

    @model_validator(mode="after")
    def _a_temperature_that_the_engine_has(self) -> Self:
        if self.temperature < _LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature {self.temperature:g} is below {_LEAST_TEMPERATURE:g}, and vLLM would sample at that instead, "
                "while training scored tokens at the smaller one"
            )
        return self

    def conflicts(self, run: RunConfig) -> Iterator[tuple[Path, str]]:
        """A model that is not there."""
        yield from super().conflicts(run)
        if self.model_name is not None and (problem := model_path_problem(self.model_name)) is not None:
            yield ("model_name",), problem

    def for_policy(self, policy: PolicyConfig) -> Self:
        """This section with what it leaves open taken from the policy: model, type, tokenizer, length, and no weights."""
        own = self.vllm_cfg
        loaded_as = getattr(policy, f"{policy.backend}_cfg", None)
        filled: dict[str, Any] = {
            "max_model_len": min(own.max_model_len or policy.max_total_sequence_length, policy.max_total_sequence_length),
            "precision": own.precision or policy.precision,
            "tokenizer": own.tokenizer or policy.tokenizer,
            "load_format": own.load_format or "dummy",
            "trust_remote_code": own.trust_remote_code or bool(getattr(loaded_as, "trust_remote_code", False)),
        }
        return super().for_policy(policy).model_copy(update={"vllm_cfg": own.model_copy(update=filled)})
