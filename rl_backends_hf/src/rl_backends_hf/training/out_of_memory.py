"""Explains that a rank's GPU is out of memory: what was on it, and which key to change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from rl_backends_hf.config import HFPolicyConfig
from rl_backends_hf.shards import local
from rl_backends_hf.training.training_state import TrainingState
from rl_core.errors import RLCoreError


@contextmanager
def explaining_memory(
    config: HFPolicyConfig, weights: torch.nn.Module, state: TrainingState | None, *, training: bool
) -> Iterator[None]:
    """Raise torch's error of a full GPU with the memory of each kind of tensor, measured before the block is left.

    Args:
        config: the section of the model.
        weights: the model.
        state: its optimizer state, if it has one.
        training: whether the block trains; otherwise it scores.

    Raises:
        RLCoreError: the GPU is out of memory.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        allocated, cached = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        free, total = torch.cuda.mem_get_info()
        sizes = _sizes(weights, state)
        sizes["activations and others"] = allocated - sum(sizes.values())
        sizes["unused in torch's cache"] = cached - allocated
        sizes["other processes, such as the engine"] = total - free - cached
        listed = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in sizes.items() if size > 0)
        action = "trains" if training else "scores"
        raise RLCoreError(
            f"The GPU ({total / 2**30:.2f} GiB) was out of memory while {config.model_name} {action}. On it were, in GiB: "
            f"{listed}. {_advice(config, training=training)}"
        ) from error


def _sizes(weights: torch.nn.Module, state: TrainingState | None) -> dict[str, int]:
    """Bytes on the GPU by kind; tensors that are two kinds, such as float32 weights that are masters, count as the first."""
    kinds: dict[str, Iterable[torch.Tensor]] = {"weights": weights.parameters()}
    if state is not None:
        masters = state.masters.parameters.values()
        kinds["float32 master weights"] = masters
        kinds["gradients"] = state.masters.gradients().values()
        values = (value for each in state.optimizer.state.values() for value in each.values())
        kinds["optimizer state"] = (value for value in values if isinstance(value, torch.Tensor))
    sizes, counted = dict.fromkeys(kinds, 0), set[int]()
    for kind, tensors in kinds.items():
        for tensor in map(local, tensors):
            address = tensor.data_ptr()
            if tensor.is_cuda and address not in counted:
                counted.add(address)
                sizes[kind] += tensor.nbytes
    return sizes


def _advice(config: HFPolicyConfig, *, training: bool) -> str:
    if config.sequence_packing.enabled or config.dynamic_batching.enabled:
        section = "sequence_packing" if config.sequence_packing.enabled else "dynamic_batching"
        key = f"{section}.{'train_mb_tokens' if training else 'logprob_mb_tokens'}"
    else:
        key = "train_micro_batch_size" if training else "logprob_batch_size"
    further = " or set `activation_checkpointing: true`" if training and not config.activation_checkpointing else ""
    return f"Lower `{key}` in the section of this model{further}; results do not depend on either."
