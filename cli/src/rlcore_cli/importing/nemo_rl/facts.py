"""Properties of a whole NeMo RL config, used to convert single keys; and the keys that rlcore needs in addition."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlcore_cli.importing.rows import Defaulted, ForeignConfig

ALGORITHMS = ("grpo", "ppo", "sft", "dpo", "rm", "distillation")
"""The supported algorithms; the first section found is used."""

COLOCATED = "policy and engine are always colocated"


def algorithm_of(foreign: ForeignConfig) -> str | None:
    """The first algorithm of the config that rlcore supports, or None."""
    return next((name for name in ALGORITHMS if name in foreign.values), None)


def is_megatron(foreign: ForeignConfig) -> bool:
    """Whether the policy backend is Megatron."""
    return foreign.get("policy.megatron_cfg.enabled") is True


def samples(foreign: ForeignConfig) -> bool:
    """Whether the algorithm samples."""
    return algorithm_of(foreign) in ("grpo", "ppo", "distillation")


def ranks(foreign: ForeignConfig) -> int:
    """Number of training ranks."""
    return foreign.number("cluster.gpus_per_node", 1) * foreign.number("cluster.num_nodes", 1)


def has_pairs(foreign: ForeignConfig) -> bool:
    """Whether the algorithm trains on preference pairs. NeMo RL counts pairs; rlcore counts two rows per pair."""
    return algorithm_of(foreign) in ("dpo", "rm")


def held_out_share(foreign: ForeignConfig) -> float:
    """Fraction of the training data that NeMo RL holds out if there is no other validation data; 0.0 if none."""
    written = foreign.get("data.train.split_validation_size", foreign.get("data.default.split_validation_size", 0.0))
    is_share = isinstance(written, float) and 0.0 < written < 1.0
    return written if is_share and foreign.get("data.validation") is None else 0.0


def validates(foreign: ForeignConfig) -> bool:
    """Whether there is validation data that can be converted."""
    held_out = foreign.get("data.validation")
    is_one = isinstance(held_out, Mapping) or (isinstance(held_out, list) and len(held_out) == 1)
    return is_one or foreign.get("data.val_data_path") is not None or held_out_share(foreign) > 0.0


def is_on(key: str) -> Callable[[ForeignConfig], bool]:
    """Whether a key is true."""
    return lambda foreign: foreign.get(key) is True


def engine_is(name: str) -> Callable[[ForeignConfig], bool]:
    """Whether the generation backend has this name."""
    return lambda foreign: foreign.get("policy.generation.backend") == name


def additions(foreign: ForeignConfig, native: Mapping[str, Any]) -> Iterator[Defaulted]:
    """Keys that rlcore needs and that correspond to no key of the config."""
    algorithm = algorithm_of(foreign)
    if algorithm is not None and not any(key.startswith(f"{algorithm}.") for key in native):
        yield Defaulted(key=algorithm, value={}, reason="algorithm with its default settings")
    for section in ("policy", "value", "teacher"):
        if not any(key.startswith(f"{section}.") for key in native):
            continue
        backend = native.get(f"{section}.backend")
        if backend is None:
            yield Defaulted(
                key=f"{section}.backend", value="hf", reason="NeMo RL trains with PyTorch's DTensor unless Megatron is enabled"
            )
        if backend != "megatron" and f"{section}.hf_cfg.lora" not in native and ranks(foreign) > 1:
            reason = "NeMo RL shards weights over the ranks"
            yield Defaulted(key=f"{section}.hf_cfg.data_parallel", value="fsdp2", reason=reason)
        yield from _scored_tokens(section, native)
    if samples(foreign):
        yield from _engine_additions(foreign, native)
    if native.get("logger.loggers.wandb.enabled") is True:
        yield Defaulted(key="logger.loggers.wandb.mode", value="online", reason="NeMo RL uploads; the default here is offline")


def _engine_additions(foreign: ForeignConfig, native: Mapping[str, Any]) -> Iterator[Defaulted]:
    if native.get("policy.generation.backend") == "vllm":
        at = "policy.generation.vllm_cfg"
        size = foreign.number(f"{at}.tensor_parallel_size", 1) * foreign.number(f"{at}.pipeline_parallel_size", 1)
        if size > 1:
            reason = f"{ranks(foreign)} GPUs, {size} per replica"
            yield Defaulted(key="policy.generation.num_workers", value=max(1, ranks(foreign) // size), reason=reason)
        yield Defaulted(key=f"{at}.sleep_level", value=1, reason="NeMo RL frees the engine's memory during training")
    if "policy.generation.val_temperature" not in native and foreign.get("policy.generation") is not None:
        value = foreign.get("policy.generation.temperature", 1.0)
        yield Defaulted(
            key="policy.generation.val_temperature", value=value, reason="NeMo RL validates at the training temperature"
        )
    if any(key.startswith("data.") for key in native):
        yield Defaulted(key="data.on_long_prompt", value="drop", reason="NeMo RL drops longer prompts from training")


def _scored_tokens(section: str, native: Mapping[str, Any]) -> Iterator[Defaulted]:
    """`logprob_mb_tokens`, if it is not set: the default may be smaller than the longest row."""
    longest = native.get(f"{section}.max_total_sequence_length")
    for batching in ("dynamic_batching", "sequence_packing"):
        at = f"{section}.{batching}"
        if native.get(f"{at}.enabled") is True and f"{at}.logprob_mb_tokens" not in native and isinstance(longest, int):
            yield Defaulted(key=f"{at}.logprob_mb_tokens", value=longest, reason="the token budget must fit the longest row")
