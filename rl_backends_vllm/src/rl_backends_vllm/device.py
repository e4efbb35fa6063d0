"""Environment variables and engine arguments that differ between CPU and GPU. No other module depends on the device.

Reasons: spinning OpenMP threads slow down other processes (`KMP_BLOCKTIME`, `OMP_WAIT_POLICY`), and Intel's OpenMP runtime, if
installed, is about 1.5 times as fast as GNU's. Binding threads to cores would take the policy's cores. Without an explicit
size, the KV cache on a CPU takes nearly all memory. Compiling takes a minute and saves a third of the time.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from rl_backends_vllm.config import CPU_ROWS, VllmEngineConfig
from rl_core.errors import ConfigError

_MAX_CPU_KV_BYTES = 2**30
_COMMON = {
    # Run the engine core in the worker's process: saves two processes and 20 seconds.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
_LOGGING = {
    "VLLM_CONFIGURE_LOGGING": "1",
    # Starting prints about ten irrelevant warnings, some from torch's C++ code.
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
_GPU = {
    # The model runner determines the interface of the logits processor for greedy rows; see `greedy`.
    "VLLM_USE_V2_MODEL_RUNNER": "1",
}
_CPU = {
    # The sampler compiles one helper regardless of engine settings, which takes ten seconds at the first row.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "KMP_BLOCKTIME": "1",
    "OMP_WAIT_POLICY": "passive",
}


def worker_environment(*, use_gpus: bool, python: str | None = None) -> dict[str, str]:
    """Environment variables of a worker process. The user's own vLLM logging variables are kept.

    Args:
        use_gpus: whether workers run on GPUs.
        python: interpreter of the workers; None for the driver's.
    """
    common = _COMMON | {name: os.environ.get(name, value) for name, value in _LOGGING.items()}
    if use_gpus:
        return common | _GPU
    preloaded = _ld_preload(python)
    return {**common, **_CPU, **({"LD_PRELOAD": preloaded} if preloaded else {})}


def set_process_environment(device: str) -> None:
    """Set the variables of `worker_environment` that still take effect in this process. The user's own values are kept.

    Args:
        device: "cpu" or "cuda".
    """
    for name, value in {**_COMMON, **_LOGGING, **(_CPU if device == "cpu" else _GPU)}.items():
        os.environ.setdefault(name, value)


def quiet_import() -> None:
    """Make vLLM log at the level set in the environment during its import. vLLM applies it only when an engine starts."""
    logger = logging.getLogger("vllm")
    if logger.level == logging.NOTSET:
        logger.setLevel(os.environ.get("VLLM_LOGGING_LEVEL", _LOGGING["VLLM_LOGGING_LEVEL"]).upper())
    # vLLM inspects all names in modules, including ones that torch has deprecated.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")


def engine_arguments(config: VllmEngineConfig, *, device: str, hf_config: Any) -> dict[str, Any]:
    """The arguments of `vllm.EngineArgs` that depend on the device.

    Args:
        config: the section.
        device: "cpu" or "cuda".
        hf_config: the model's configuration.
    """
    speculation = _speculation(config, device)
    if device != "cpu":
        kv_bytes = None if config.kv_cache_gib is None else int(config.kv_cache_gib * 2**30)
        return {
            **speculation,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "enforce_eager": bool(config.enforce_eager),
            "max_num_seqs": config.max_num_seqs,
            "kv_cache_memory_bytes": kv_bytes,
            "enable_sleep_mode": bool(config.sleep_level),
        }
    _check_cpu_support(config, hf_config)
    return {
        **speculation,
        "enforce_eager": config.enforce_eager is None or config.enforce_eager,
        "max_num_seqs": _cpu_rows(config),
        "kv_cache_memory_bytes": cpu_kv_bytes(config, hf_config),
        # A partially prefilled prompt draws a token too early, which vLLM undoes for GPU generators only: on a CPU, seeded rows
        # would fail. Prompts are therefore prefilled whole.
        "enable_chunked_prefill": False,
    }


def _speculation(config: VllmEngineConfig, device: str) -> dict[str, Any]:
    section = config.ngram_speculation
    if section is None:
        return {"speculative_config": None}
    lookup = {"prompt_lookup_max": section.prompt_lookup_max, "prompt_lookup_min": section.prompt_lookup_min}
    count = {"num_speculative_tokens": section.num_speculative_tokens}
    if device != "cpu":
        return {"speculative_config": {"method": "ngram", **count, **lookup}}
    # vLLM's own proposer for CPUs is compiled by numba, after whose import no other engine of vLLM 0.32 starts in the process.
    method = {"method": "custom_class", "model": "rl_backends_vllm.executors.NgramProposer"}
    return {"speculative_config": method | count, "additional_config": count | lookup}


def enable_amx(device: str) -> None:
    """Ask Linux for permission to use the tile registers (AMX) of a CPU that has them.

    vLLM's bfloat16 attention uses them without asking; without permission, the process is killed by SIGILL.
    """
    if device == "cpu":
        import torch

        torch.cpu._init_amx()


def greedy_processor(device: str) -> str:
    """Import path of the logits processor for greedy rows, for the model runner that vLLM uses on the device."""
    return (
        "rl_backends_vllm.greedy:GreedyTemperature" if device == "cpu" else "rl_backends_vllm.greedy_on_gpu:GreedyTemperature"
    )


def matmul_precision(dtype: str, *, device: str) -> str:
    """Effective precision of a model of `dtype`. On a GPU, vLLM's attention multiplies float32 as TF32 (10-bit mantissa)."""
    return "tf32" if dtype == "float32" and device != "cpu" else dtype


def can_sleep(device: str) -> bool:
    """Whether memory freed by the engine can be used by other processes."""
    return device != "cpu"


def _check_cpu_support(config: VllmEngineConfig, hf_config: Any) -> None:
    """Raise ConfigError for settings with which vLLM 0.32 on a CPU would start, then fail at the first row."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if config.pipeline_parallel_size > 1:
        raise ConfigError(
            "vLLM 0.32 on a CPU loses requests under pipeline parallelism. Set policy.generation.vllm_cfg."
            "pipeline_parallel_size: 1, and use tensor_parallel_size if you need more than one process."
        )
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if other := sorted({_head_dim(layer) for layer in _layers(hf_config)} - {*sizes}):
        raise ConfigError(
            f"vLLM's attention on a CPU supports head sizes {', '.join(map(str, sizes))}, but this model's is "
            f"{other[0]}. Set policy.generation.backend: hf, or run vLLM on a GPU."
        )


def _layers(hf_config: Any) -> list[Any]:
    """The config of each layer; those of Gemma 4 differ."""
    text = hf_config.get_text_config(decoder=True)
    return list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text] * text.num_hidden_layers


def _head_dim(layer: Any) -> int:
    return int(getattr(layer, "head_dim", None) or layer.hidden_size // max(1, getattr(layer, "num_attention_heads", 0)))


def token_kv_bytes(config: VllmEngineConfig, hf_config: Any, *, latent: bool = False) -> int:
    """Bytes of the keys and values of one token in one process; arguments as `engine_arguments`.

    Recurrent layers count as attention. With `latent`, latent attention (MLA) keeps its latent in each process, as on GPUs.
    """
    width, text = 0, hf_config.get_text_config(decoder=True)
    size = 4 if config.precision == "float32" else 2
    if latent and (rank := getattr(text, "kv_lora_rank", None)):
        return int((rank + text.qk_rope_head_dim) * text.num_hidden_layers * size) // config.pipeline_parallel_size
    for layer in _layers(hf_config):
        heads = getattr(layer, "num_key_value_heads", None) or getattr(layer, "num_attention_heads", None) or 0
        width += int(heads) * _head_dim(layer)
    return 2 * width * size // config.processes


def row_kv_bytes(config: VllmEngineConfig, hf_config: Any, *, latent: bool = False) -> int:
    """As `token_kv_bytes`, of one row at full length, in whole blocks."""
    own: int = getattr(hf_config.get_text_config(decoder=True), "max_position_embeddings", 0)
    length = config.max_model_len or own
    return token_kv_bytes(config, hf_config, latent=latent) * (-(-length // _CPU_BLOCK) + 1) * _CPU_BLOCK


def cpu_kv_bytes(config: VllmEngineConfig, hf_config: Any) -> int:
    """Size of the KV cache of one process on a CPU, in bytes.

    It is `kv_cache_gib`, or enough for all rows at full length: at most 1 GiB, but enough for at least one row.
    Arguments as `engine_arguments`.
    """
    if config.kv_cache_gib is not None:
        return int(config.kv_cache_gib * 2**30)
    row = row_kv_bytes(config, hf_config)
    return max(min(row * _cpu_rows(config), _MAX_CPU_KV_BYTES), 2 * row)


def _cpu_rows(config: VllmEngineConfig) -> int:
    return config.max_num_seqs or CPU_ROWS


_CPU_BLOCK = 128
"""Tokens per block of the KV cache."""


def _ld_preload(python: str | None) -> str:
    """Value of LD_PRELOAD: Intel's OpenMP runtime in the worker's environment, and inherited entries that are not OpenMP.

    vLLM preloads GNU's runtime for child processes of the process that imported it, and does not start with two runtimes.
    """
    prefix = Path(python).parent.parent if python is not None else Path(sys.prefix)
    library = prefix / "lib" / "libiomp5.so"
    inherited = [part for part in re.split(r"[: ]+", os.environ.get("LD_PRELOAD", "")) if part]
    if not library.exists():
        return ":".join(inherited)
    others = [part for part in inherited if not Path(part).name.startswith(("libgomp", "libiomp", "libomp"))]
    return ":".join([str(library), *others])
