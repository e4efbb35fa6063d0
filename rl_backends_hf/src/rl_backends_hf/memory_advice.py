"""Keys that lower the memory of a policy or an engine, with values, for the errors of full memory."""

from __future__ import annotations

from rl_backends_hf.config import HFGenerationConfig, HFPolicyConfig


def policy_advice(config: HFPolicyConfig, doing: str) -> str:
    """Which keys of the section lower the memory of a phase, such as "scoring".

    Args:
        config: the section of the model.
        doing: the phase, as `rl_core.interfaces.out_of_memory.explaining_memory` names it.
    """
    hf, keys = config.hf_cfg, []
    training = doing == "training"
    if training or doing == "scoring":
        keys += _smaller_microbatches(config, training=training)
        if training and not config.activation_checkpointing:
            keys.append("set `activation_checkpointing: true`")
        if hf.logprob_chunk_tokens > 64:
            keys.append(f"lower `hf_cfg.logprob_chunk_tokens` from {hf.logprob_chunk_tokens} to {hf.logprob_chunk_tokens // 2}")
    elif doing == "sampling":
        rows = config.own_sampler.hf_cfg.max_batch_rows
        keys.append(f"lower `generation.hf_cfg.max_batch_rows` from {rows} to {max(1, rows // 2)}")
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


def _smaller_microbatches(config: HFPolicyConfig, *, training: bool) -> list[str]:
    """The key of the size of microbatches, with half of its value, unless they cannot be smaller."""
    if config.sequence_packing.enabled or config.dynamic_batching.enabled:
        section = "sequence_packing" if config.sequence_packing.enabled else "dynamic_batching"
        key = f"{section}.{'train_mb_tokens' if training else 'logprob_mb_tokens'}"
        size = getattr(getattr(config, section), key.partition(".")[2])
        smallest = config.max_total_sequence_length
    else:
        key = "train_micro_batch_size" if training else "logprob_batch_size"
        size, smallest = getattr(config, key), 1
    return [f"lower `{key}` from {size} to {max(smallest, size // 2)}"] if size > smallest else []
