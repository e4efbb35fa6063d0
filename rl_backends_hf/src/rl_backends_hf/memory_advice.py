"""Keys that lower the memory of a policy or an engine, with values, for the errors of full memory."""

from __future__ import annotations

from rl_backends_hf.config import HFGenerationConfig, HFPolicyConfig
from rl_core.interfaces.worker_context import halved


def policy_advice(config: HFPolicyConfig, doing: str) -> str:
    """Which keys of the section lower the memory of a phase, such as "scoring".

    Args:
        config: the section of the model.
        doing: the phase, as `rl_core.interfaces.worker_context.explaining_memory` names it.
    """
    hf, keys = config.hf_cfg, []
    training = doing == "training"
    if training or doing == "scoring":
        keys += halved(*config.microbatch_limit(training=training))
        if training and not config.activation_checkpointing:
            keys.append("set `activation_checkpointing: true`")
        keys += halved("hf_cfg.logprob_chunk_tokens", hf.logprob_chunk_tokens, 64)
    elif doing == "sampling":
        keys += halved("generation.hf_cfg.max_batch_rows", config.own_sampler.hf_cfg.max_batch_rows)
    elif doing == "a refit":
        keys.append("lower `policy.generation.refit_buffer_mib`")
    if not keys or doing in ("loading", "the optimizer step"):
        if hf.lora is None and not config.frozen:
            keys.append("train adapters (`hf_cfg.lora: {}`)")
        if hf.data_parallel != "fsdp2":
            keys.append("shard the model over several ranks (`hf_cfg.data_parallel: fsdp2`)")
        if config.dtype_name == "float32" and doing == "loading":
            keys.append("set `precision: bfloat16`")
    keys.append("let the engine use less of the GPU, if both share it")
    return f"In the section of this model: {'; or '.join(keys)}."


def generation_advice(config: HFGenerationConfig, doing: str) -> str:
    """Which keys of the engine's section lower the memory of a phase; see `policy_advice`."""
    hf, section = config.hf_cfg, "policy.generation.hf_cfg"
    if doing == "loading":
        return f"Set `{section}.precision: bfloat16`, or use a smaller model."
    kept = f", and `{section}.session_cache_mb` from {hf.session_cache_mb} to 0" if hf.session_cache_mb else ""
    return (
        f"Lower `{section}.max_batch_rows` from {hf.max_batch_rows} to {max(1, hf.max_batch_rows // 2)}{kept}, or set "
        f"`{section}.kv_cache_gib`."
    )
