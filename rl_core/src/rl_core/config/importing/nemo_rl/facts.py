"""What a NeMo RL config says as a whole, asked by the conversions of single keys; and what ours needs besides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rl_core.config.importing.rows import Added, Becomes, Decision, Theirs, Unneeded

ALGORITHMS = ("grpo", "ppo", "sft", "dpo", "rm", "distillation")
"""The supported algorithms; the first section found is used."""

COLOCATED = "policy and engine are always colocated"


def algorithm_of(theirs: Theirs) -> str | None:
    """The algorithm of theirs that there is one of here, or None."""
    return next((name for name in ALGORITHMS if name in theirs.values), None)


def is_megatron(theirs: Theirs) -> bool:
    """Whether Megatron trains."""
    return theirs.get("policy.megatron_cfg.enabled") is True


def samples(theirs: Theirs) -> bool:
    """Whether the algorithm samples."""
    return algorithm_of(theirs) in ("grpo", "ppo", "distillation")


def ranks(theirs: Theirs) -> int:
    """Ranks that train."""
    return theirs.number("cluster.gpus_per_node", 1) * theirs.number("cluster.num_nodes", 1)


def has_pairs(theirs: Theirs) -> bool:
    """Whether the algorithm learns from pairs of answers, which theirs counts and ours counts as two rows."""
    return algorithm_of(theirs) in ("dpo", "rm")


def held_out_share(theirs: Theirs) -> float:
    """The share of the training data that theirs holds out where it has no other validation data; 0.0 for none."""
    written = theirs.get("data.train.split_validation_size", theirs.get("data.default.split_validation_size", 0.0))
    is_share = isinstance(written, float) and 0.0 < written < 1.0
    return written if is_share and theirs.get("data.validation") is None else 0.0


def validates(theirs: Theirs) -> bool:
    """Whether there is validation data that ours can have."""
    held_out = theirs.get("data.validation")
    is_one = isinstance(held_out, Mapping) or (isinstance(held_out, list) and len(held_out) == 1)
    return is_one or theirs.get("data.val_data_path") is not None or held_out_share(theirs) > 0.0


def is_on(key: str) -> Callable[[Theirs], bool]:
    """Whether a key switches something on."""
    return lambda theirs: theirs.get(key) is True


def engine_is(name: str) -> Callable[[Theirs], bool]:
    """Whether the engine is that one."""
    return lambda theirs: theirs.get("policy.generation.backend") == name


def megatron(value: Any, theirs: Theirs) -> Decision:
    """The backend, where Megatron trains."""
    return Becomes({"policy.backend": "megatron"}) if value is True else Unneeded("another backend trains")


def dtensor(value: Any, theirs: Theirs) -> Decision:
    """The backend, where PyTorch's own parallelism trains."""
    if is_megatron(theirs) or value is not True:
        return Unneeded("policy.megatron_cfg.enabled decides")
    return Becomes({"policy.backend": "hf"})


def logger(name: str) -> Callable[[Any, Theirs], Decision]:
    """A logger of the same name."""

    def decide(value: Any, theirs: Theirs) -> Decision:
        return Becomes({f"logger.loggers.{name}.enabled": True}) if value is True else Unneeded("disabled")

    return decide


def additions(theirs: Theirs, ours: Mapping[str, Any]) -> Iterator[Added]:
    """What ours needs and no key of theirs says."""
    algorithm = algorithm_of(theirs)
    if algorithm is not None and not any(key.startswith(f"{algorithm}.") for key in ours):
        yield Added(key=algorithm, value={}, reason="the algorithm, with its defaults")
    for section in ("policy", "value", "teacher"):
        if not any(key.startswith(f"{section}.") for key in ours):
            continue
        backend = ours.get(f"{section}.backend")
        if backend is None:
            yield Added(key=f"{section}.backend", value="hf", reason="theirs trains with PyTorch's own parallelism")
        if backend != "megatron" and f"{section}.hf_cfg.lora" not in ours and ranks(theirs) > 1:
            reason = "theirs shards weights over the ranks"
            yield Added(key=f"{section}.hf_cfg.data_parallel", value="fsdp2", reason=reason)
        yield from _scored_tokens(section, ours)
    if samples(theirs):
        yield from _engine_additions(theirs, ours)
    if ours.get("logger.loggers.wandb.enabled") is True:
        yield Added(key="logger.loggers.wandb.mode", value="online", reason="theirs sends; here it stays offline unless told")


def _engine_additions(theirs: Theirs, ours: Mapping[str, Any]) -> Iterator[Added]:
    if ours.get("policy.generation.backend") == "vllm":
        at = "policy.generation.vllm_cfg"
        size = theirs.number(f"{at}.tensor_parallel_size", 1) * theirs.number(f"{at}.pipeline_parallel_size", 1)
        if size > 1:
            reason = f"{ranks(theirs)} GPUs, {size} to a replica"
            yield Added(key="policy.generation.num_workers", value=max(1, ranks(theirs) // size), reason=reason)
        yield Added(key=f"{at}.sleep_level", value=1, reason="theirs frees the engine's memory while the policy trains")
    if "policy.generation.val_temperature" not in ours and theirs.get("policy.generation") is not None:
        value = theirs.get("policy.generation.temperature", 1.0)
        yield Added(key="policy.generation.val_temperature", value=value, reason="theirs validates as it trains")
    if any(key.startswith("data.") for key in ours):
        yield Added(key="data.on_long_prompt", value="drop", reason="theirs leaves longer prompts out of training")


def _scored_tokens(section: str, ours: Mapping[str, Any]) -> Iterator[Added]:
    """A budget for scoring, where theirs never scores and a row is longer than ours by default."""
    longest = ours.get(f"{section}.max_total_sequence_length")
    for batching in ("dynamic_batching", "sequence_packing"):
        at = f"{section}.{batching}"
        if ours.get(f"{at}.enabled") is True and f"{at}.logprob_mb_tokens" not in ours and isinstance(longest, int):
            yield Added(key=f"{at}.logprob_mb_tokens", value=longest, reason="a budget holds one row at least")
