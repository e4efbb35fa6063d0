"""Builds vLLM's configuration for a GPU that this machine does not have, run as a program by test_cuda_config.py.

Arguments: folder of a model, and the section `policy.generation` as JSON. Prints what vLLM chose, as JSON.
"""

from __future__ import annotations

import json
import sys
from types import ModuleType

import torch

GIB = 2**30


class Kernels(ModuleType):
    """Replaces a module of kernels, which a build for CPUs does not contain. They can be imported, but not called."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def simulate_h100s() -> None:
    """Let vLLM find eight GPUs: its own platform of GPUs, with the answers of the driver."""
    for name in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm.vllm_flash_attn"):
        sys.modules[name] = Kernels(name)
    for name in ("cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8", "cutlass_group_gemm_supported"):
        setattr(torch.ops._C, name, lambda capability: True)
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    answers = {
        "get_device_capability": DeviceCapability(9, 0),
        "get_device_name": "NVIDIA H100 80GB HBM3",
        "get_device_total_memory": 80 * GIB,
        "device_count": 8,
        "num_compute_units": 132,
        "is_fully_connected": True,
        "is_cumem_allocator_available": True,
    }
    driver = {name: classmethod(lambda cls, *_, answer=answer, **__: answer) for name, answer in answers.items()}
    vllm.platforms._current_platform = type("SimulatedH100", (CudaPlatformBase,), driver)()
    torch.cuda.is_available = lambda: True  # type: ignore[assignment]


def main(folder: str, section: str) -> None:
    """Print the configuration of one engine."""
    simulate_h100s()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    from rl_backends_vllm.config import VllmConfig
    from rl_backends_vllm.model_folder import model_files
    from rl_backends_vllm.worker import VllmGenerationWorker
    from rl_core.interfaces.worker_context import WorkerContext

    config = VllmConfig(model_name=folder, **json.loads(section))
    context = WorkerContext(
        rank=0, world_size=1, local_rank=0, node_rank=0, master_address="127.0.0.1", master_port=1, device="cuda"
    )
    worker = VllmGenerationWorker(context, config)
    with model_files(folder, tokenizer_name=None, trust_remote_code=False, temp_dir=None) as files:
        arguments = {name: value for name, value in worker._arguments(files, "dummy").items() if value is not None}
        built = EngineArgs(**arguments).create_engine_config(usage_context=UsageContext.LLM_CLASS)
    found = {
        "device": built.device_config.device_type,
        "max_num_seqs": built.scheduler_config.max_num_seqs,
        "chunked_prefill": built.scheduler_config.enable_chunked_prefill,
        "cuda_graphs": built.compilation_config.cudagraph_mode.name,
        "sleep_mode": built.model_config.enable_sleep_mode,
        "tensor_parallel": built.parallel_config.tensor_parallel_size,
        "gpu_memory_utilization": built.cache_config.gpu_memory_utilization,
        "executor": built.parallel_config.distributed_executor_backend.__name__,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
