"""Keys that lower the memory of a policy, with values, for the errors of full memory."""

from __future__ import annotations

from rl_backends_megatron.config import MegatronPolicyConfig
from rl_core.interfaces.worker_context import halved


def memory_advice(config: MegatronPolicyConfig, doing: str) -> str:
    """Which keys of the section lower the memory of a phase, such as "scoring".

    Args:
        config: the section of the model.
        doing: the phase, as `rl_core.interfaces.worker_context.explaining_memory` names it.
    """
    megatron, keys = config.megatron_cfg, []
    training = doing == "training"
    if training or doing == "scoring":
        keys += halved(*config.microbatch_limit(training=training))
        if training and not (config.activation_checkpointing or megatron.recompute_granularity == "full"):
            keys.append("set `activation_checkpointing: true`")
    elif doing == "a refit":
        keys.append("lower `policy.generation.refit_buffer_mib`")
    if not keys or doing in ("loading", "the optimizer step"):
        if not (config.frozen or megatron.use_distributed_optimizer):
            keys.append("shard the optimizer state (`megatron_cfg.use_distributed_optimizer: true`)")
        ranks = megatron.tensor_model_parallel_size
        keys.append(f"raise `megatron_cfg.tensor_model_parallel_size` from {ranks} to {2 * ranks}")
        if config.dtype_name == "float32":
            keys.append("set `precision: bfloat16`")
    keys.append("let the engine use less of the GPU, if both share it")
    return f"In the section of this model: {'; or '.join(keys)}."
