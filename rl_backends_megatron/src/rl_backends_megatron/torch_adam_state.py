"""What Megatron-Core 0.16.1 needs to load the state of an optimizer of torch; not for those of Transformer Engine.

Megatron-Core is written for fused optimizers, which have state from the start and count steps once for all parameters. Those of
torch have none before the first step, and count them for each parameter. Unmended, loading fails, or gives all parameters *one*
counter, which a step then raises once for each of them: the next update is wrong in silence (3.5e-4).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def give_state(part: Any) -> None:
    """Give every parameter the state that a first step would, of zeros.

    Args:
        part: one of Megatron's optimizers.
    """
    optimizer = part.optimizer
    if optimizer is None:
        return
    part.init_state_fn = _do_nothing
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = _first_state(optimizer, group, parameter)


def own_steps(part: Any) -> None:
    """Give every parameter a step counter of its own."""
    if part.optimizer is None:
        return
    for state in part.optimizer.state.values():
        if "exp_avg" in state:
            # Zero is left out of a checkpoint.
            state["step"] = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32).clone()


@contextmanager
def sets_copies(parts: Sequence[Any]) -> Iterator[None]:
    """While a checkpoint loads, distributed optimizers copy tensors into their shards, whatever entries a state has."""
    divided = [part for part in parts if isinstance(part, DistributedOptimizer)]
    for part in divided:
        part._set_main_param_and_optimizer_states = partial(_copy_into, part)
    try:
        yield
    finally:
        for part in divided:
            del part._set_main_param_and_optimizer_states


@torch.no_grad()
def _copy_into(part: Any, model_parameter: torch.nn.Parameter, tensors: Mapping[str, torch.Tensor]) -> None:
    group, place = part.model_param_group_index_map[model_parameter]
    own = part.optimizer.param_groups[group]["params"][place]
    for name, target in {"param": own, **part.optimizer.state[own]}.items():
        if name in tensors:
            target.copy_(tensors[name])


def _first_state(optimizer: Any, group: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    if "betas" in group:
        return {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return {"momentum_buffer": torch.zeros_like(parameter)} if group.get("momentum") else {}


def _do_nothing(*_: Any) -> None:
    return None
