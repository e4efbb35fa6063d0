"""Corrections that Megatron-Core 0.16.1 needs to save and load its optimizers' state completely.

Without them, three things go wrong, mostly silently:

- Megatron expects fused optimizers, which have state from the start and one step count for all parameters. torch's optimizers
  have no state before the first step, and a count per parameter. Loading then fails, or gives all parameters *one* shared
  counter, which each of them increments in a step (an error of 3.5e-4 in the next update).
- The distributed optimizer saves state without the padding between gradient buckets, but reads it at offsets that include the
  padding. With several buckets, every parameter after the first bucket is saved shifted.
- With expert parallelism, experts have a separate optimizer. Tensors are saved under names of the full model, but values saved
  once per optimizer (groups, step count) have a different form for one optimizer than for two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from rl_backends_megatron.megatron_internals import GATHERED_STATE, LOADED_STATE

_OF_TORCH = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def init_state(megatron_optimizer: Any) -> None:
    """Give every parameter its initial optimizer state; does nothing for optimizers that are not torch's.

    Args:
        megatron_optimizer: one of Megatron's optimizers.
    """
    optimizer = megatron_optimizer.optimizer
    if not isinstance(optimizer, _OF_TORCH):
        return
    megatron_optimizer.init_state_fn = _do_nothing
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = _first_state(group, parameter)


def separate_step_counters(megatron_optimizer: Any) -> None:
    """Give every parameter its own step counter, on its device."""
    if not isinstance(megatron_optimizer.optimizer, _OF_TORCH):
        return
    for parameter, state in megatron_optimizer.optimizer.state.items():
        if "exp_avg" in state:
            state["step"] = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32).to(parameter.device, copy=True)


def match_layout(requested: Mapping[Any, Any], found: Mapping[Any, Any], *, steps: int) -> dict[Any, Any]:
    """A loaded state in the form that the current optimizers read, even if a different number of optimizers saved it.

    Args:
        requested: the current optimizers' own state; by index if there are several.
        found: the loaded state: tensors in the form of `requested`, and values saved once per optimizer.
        steps: number of steps that had been taken when it was saved.
    """
    several = all(isinstance(key, int) for key in requested)
    if all(isinstance(key, int) == several for key in found):
        return _set_step_counts(dict(found), 0)
    # Groups contain settings, which the schedule sets before each step, so the current optimizers' groups can be used.
    return _set_step_counts(_fill_missing(found, requested), steps)


def _fill_missing(found: Any, requested: Any) -> Any:
    """`found`, completed with entries of `requested`; lists are loaded at full length, but without plain values."""
    if isinstance(requested, Mapping):
        have = found or {}
        return {key: _fill_missing(have.get(key), value) for key, value in requested.items()}
    if isinstance(requested, list) and isinstance(found, list) and len(found) == len(requested):
        return [_fill_missing(*pair) for pair in zip(found, requested, strict=True)]
    return requested if found is None else found


def _set_step_counts(state: dict[Any, Any], steps: int) -> dict[Any, Any]:
    """Set the step counts that a checkpoint omits, which it also does if they are zero; changes and returns `state`."""
    entries = state.get("state")
    for group in state.get("param_groups", ()):
        if "step" in group and steps:
            group["step"] = float(steps)
    if isinstance(entries, dict) and "param_groups" in state:
        if any("exp_avg" in entry and "step" not in entry for entry in entries.values() if isinstance(entry, dict)):
            entries.setdefault("common_step", torch.tensor(float(steps)))
    else:
        for each in state.values():
            if isinstance(each, dict):
                _set_step_counts(each, steps)
    return state


@contextmanager
def patched_state_io(megatron_optimizers: Sequence[Any]) -> Iterator[None]:
    """Make distributed optimizers save and load complete state while the block runs."""
    distributed = [each for each in megatron_optimizers if isinstance(each, DistributedOptimizer)]
    for megatron_optimizer in distributed:
        gather = GATHERED_STATE.of(megatron_optimizer)
        setattr(megatron_optimizer, GATHERED_STATE.name, partial(_with_padding, megatron_optimizer, gather))
        if isinstance(megatron_optimizer.optimizer, _OF_TORCH):
            setattr(megatron_optimizer, LOADED_STATE.name, partial(_copy_into, megatron_optimizer))
    try:
        yield
    finally:
        for megatron_optimizer in distributed:
            for internal in (GATHERED_STATE, LOADED_STATE):
                megatron_optimizer.__dict__.pop(internal.name, None)


def _with_padding(megatron_optimizer: Any, gather: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The gathered state of every buffer, including the padding between its buckets."""
    found = gather(*args, **kwargs)
    for number, buffer in enumerate(megatron_optimizer.buffers):
        if found is None or len(buffer.buckets) == 1:
            continue
        for tensors in found[number].values():
            for name in ("param", "exp_avg", "exp_avg_sq"):
                tensors[name] = _insert_padding(tensors[name], buffer)
    return found


def _insert_padding(compact: torch.Tensor, buffer: Any) -> torch.Tensor:
    padded = compact.new_zeros(buffer.numel)
    start = 0
    for bucket in buffer.buckets:
        padded[bucket.offset : bucket.offset + bucket.numel_unpadded] = compact[start : start + bucket.numel_unpadded]
        start += bucket.numel_unpadded
    return padded


@torch.no_grad()
def _copy_into(megatron_optimizer: Any, model_parameter: torch.nn.Parameter, tensors: Mapping[str, torch.Tensor]) -> None:
    group, index = megatron_optimizer.model_param_group_index_map[model_parameter]
    own = megatron_optimizer.optimizer.param_groups[group]["params"][index]
    for name, target in {"param": own, **megatron_optimizer.optimizer.state[own]}.items():
        if name in tensors:
            target.copy_(tensors[name])


def _first_state(group: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    if "betas" in group:
        return {
            "step": torch.tensor(0.0, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return {"momentum_buffer": torch.zeros_like(parameter)} if group.get("momentum") else {}


def _do_nothing(*_: Any) -> None:
    return None
