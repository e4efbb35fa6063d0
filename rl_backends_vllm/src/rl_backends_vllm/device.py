"""What differs between a CPU and a GPU: environment variables and engine arguments; nothing else in this package asks.

Why each: a spinning OpenMP thread takes the core that a neighbour needs (`KMP_BLOCKTIME`, `OMP_WAIT_POLICY`), and Intel's
runtime, where it is installed, is about 1.5 times as fast as GNU's; binding threads to cores would take those of the policy;
without a stated size the KV cache of a CPU takes nearly all memory; compiling takes a minute and gains a third of the time.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from rl_backends_vllm.config import VllmEngineConfig
from rl_core.errors import ConfigError

_MAX_CPU_KV_BYTES = 2**30
_COMMON = {
    # The engine's core runs in the worker's own process: two processes and 20 seconds less.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
_LOGGING = {
    "VLLM_CONFIGURE_LOGGING": "1",
    # A start prints about ten warnings, none about the run; torch's of C++ among them.
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
_GPU = {
    # Its choice between two model runners decides which interface the processor of greedy rows must have; see `greedy`.
    "VLLM_USE_V2_MODEL_RUNNER": "1",
}
_CPU = {
    # One helper of the sampler is compiled whatever the engine is told: ten seconds at the first row.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "KMP_BLOCKTIME": "1",
    "OMP_WAIT_POLICY": "passive",
}


def worker_environment(*, use_gpus: bool, python: str | None = None) -> dict[str, str]:
    """Environment variables that a worker's process starts with; how vLLM logs is the user's own choice, where there is one.

    Args:
        use_gpus: whether workers compute on GPUs.
        python: their interpreter, where it is not the driver's.
    """
    common = _COMMON | {name: os.environ.get(name, value) for name, value in _LOGGING.items()}
    if use_gpus:
        return common | _GPU
    preloaded = _ld_preload(python)
    return {**common, **_CPU, **({"LD_PRELOAD": preloaded} if preloaded else {})}


def set_process_environment(device: str) -> None:
    """The same for an engine in this process, as far as that still can; what the user has set stays.

    Args:
        device: "cpu" or "cuda".
    """
    for name, value in {**_COMMON, **_LOGGING, **(_CPU if device == "cpu" else _GPU)}.items():
        os.environ.setdefault(name, value)


def quiet_import() -> None:
    """Have vLLM's import log at the level of its environment; vLLM itself sets it only when an engine starts."""
    logger = logging.getLogger("vllm")
    if logger.level == logging.NOTSET:
        logger.setLevel(os.environ.get("VLLM_LOGGING_LEVEL", _LOGGING["VLLM_LOGGING_LEVEL"]).upper())
    # It looks at every name of every module, also at those that torch is about to drop.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")


def engine_arguments(config: VllmEngineConfig, *, device: str, hf_config: Any) -> dict[str, Any]:
    """The arguments of `vllm.EngineArgs` that depend on the device.

    Args:
        config: the section.
        device: "cpu" or "cuda".
        hf_config: the model's configuration.
    """
    if device != "cpu":
        kv_bytes = None if config.kv_cache_gib is None else int(config.kv_cache_gib * 2**30)
        return {
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "enforce_eager": bool(config.enforce_eager),
            "kv_cache_memory_bytes": kv_bytes,
            "enable_sleep_mode": config.sleep_level > 0,
        }
    _check_cpu_support(config, hf_config)
    stated = None if config.kv_cache_gib is None else int(config.kv_cache_gib * 2**30)
    return {
        "enforce_eager": config.enforce_eager is None or config.enforce_eager,
        "kv_cache_memory_bytes": stated or _kv_bytes(config, hf_config),
        # A prompt that is read in pieces draws a token too early, and vLLM takes that back from a GPU's generator alone: a
        # seeded row on a CPU would end in an error. Whole prompts wait for their turn instead.
        "enable_chunked_prefill": False,
    }


def enable_amx(device: str) -> None:
    """Have Linux let this process use the tile registers (AMX) of its CPU, where it has some.

    vLLM's attention in bfloat16 uses them unasked: unless a large matrix product has asked before, SIGILL ends the process.
    """
    if device == "cpu":
        import torch

        torch.cpu._init_amx()


def greedy_processor(device: str) -> str:
    """What gives greedy rows their log-probabilities, with the interface that vLLM's model runner has there."""
    return (
        "rl_backends_vllm.greedy:GreedyTemperature" if device == "cpu" else "rl_backends_vllm.greedy_on_gpu:GreedyTemperature"
    )


def matmul_precision(dtype: str, *, device: str) -> str:
    """What a model of `dtype` computes in: on a GPU vLLM's attention multiplies float32 numbers as TF32, which has ten bits."""
    return "tf32" if dtype == "float32" and device != "cpu" else dtype


def can_sleep(device: str) -> bool:
    """Whether memory that the engine frees is of use to anyone else."""
    return device != "cpu"


def _check_cpu_support(config: VllmEngineConfig, hf_config: Any) -> None:
    """Raise ConfigError for what vLLM 0.32 would begin on a CPU and fail at with the first row."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if config.pipeline_parallel_size > 1:
        raise ConfigError(
            "vLLM 0.32 on a CPU loses requests under pipeline parallelism. Set policy.generation.vllm_cfg."
            "pipeline_parallel_size: 1, and tensor_parallel_size where one process is too few."
        )
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if _head_dim(hf_config) not in sizes:
        raise ConfigError(
            f"vLLM's attention on a CPU takes heads of {', '.join(map(str, sizes))} numbers, and those of this model have "
            f"{_head_dim(hf_config)}. Set policy.generation.backend: hf, or run vLLM on a GPU."
        )


def _head_dim(hf_config: Any) -> int:
    text = hf_config.get_text_config(decoder=True)
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _kv_bytes(config: VllmEngineConfig, hf_config: Any) -> int:
    """Room for all rows at full length, at most one GiB, and at least for one row."""
    text = hf_config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    itemsize = 4 if config.precision == "float32" else 2
    token: int = 2 * text.num_hidden_layers * heads * _head_dim(hf_config) * itemsize // config.tensor_parallel_size
    length = config.max_model_len or text.max_position_embeddings
    blocks = -(-length // _CPU_BLOCK) + 1
    row: int = token * blocks * _CPU_BLOCK
    return max(min(row * config.max_num_seqs, _MAX_CPU_KV_BYTES), 2 * row)


_CPU_BLOCK = 128
"""Tokens of a block of the KV cache."""


def _ld_preload(python: str | None) -> str:
    """Intel's OpenMP runtime of the worker's environment and whatever else is preloaded already, but for another such runtime.

    vLLM preloads GNU's for the children of a process that it was imported in, and refuses to start with two of them.
    """
    prefix = Path(python).parent.parent if python is not None else Path(sys.prefix)
    library = prefix / "lib" / "libiomp5.so"
    inherited = [part for part in re.split(r"[: ]+", os.environ.get("LD_PRELOAD", "")) if part]
    if not library.exists():
        return ":".join(inherited)
    others = [part for part in inherited if not Path(part).name.startswith(("libgomp", "libiomp", "libomp"))]
    return ":".join([str(library), *others])
