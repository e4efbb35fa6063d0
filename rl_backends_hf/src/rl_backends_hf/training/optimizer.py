"""Builds the configured optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rl_backends_hf.torch_internals import compile_error
from rl_backends_hf.training.quantized_state import create_state, is_quantized
from rl_core.backend import call_named
from rl_core.config.schema import OptimizerConfig
from rl_core.errors import UserError, with_key
from rl_core.plugins.import_path import resolve

DECAY_MATRICES_ONLY = "decay_matrices_only"
"""Extra keyword in `optimizer.kwargs`: if true, biases and norms (all one-dimensional tensors) have no weight decay."""


def build_optimizer(parameters: Mapping[str, torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of the trainable parameters.

    torch's Adam and AdamW use their fused implementation (one pass over memory) unless `kwargs` specify otherwise.

    Args:
        parameters: name to parameter.
        config: import path and keyword arguments.

    Raises:
        UserError: the import path does not exist, the optimizer rejects the arguments, or its steps cannot be compiled.
    """
    with with_key("policy.optimizer.name"):
        factory = resolve(config.name, key="policy.optimizer.name")
    kwargs = dict(config.kwargs)
    matrices_only = kwargs.pop(DECAY_MATRICES_ONLY, False)
    if factory in (torch.optim.Adam, torch.optim.AdamW) and not {"fused", "foreach"} & kwargs.keys():
        kwargs["fused"] = True
    groups: Any = list(parameters.values())
    if matrices_only:
        groups = [
            {"params": [p for p in parameters.values() if p.ndim > 1]},
            {"params": [p for p in parameters.values() if p.ndim <= 1], "weight_decay": 0.0},
        ]
    optimizer = call_named(factory, groups, kwargs, key="policy.optimizer", also=(DECAY_MATRICES_ONLY,))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"`policy.optimizer.name`: {config.name} returned a {type(optimizer).__name__}, which is not a torch optimizer.",
            key="policy.optimizer.name",
        )
    if is_quantized(optimizer):
        _check_step(optimizer, config.name)
    return optimizer


def _check_step(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Take a step with one weight, which keeps its value, because torchao compiles steps."""
    try:
        create_state(optimizer, optimizer.param_groups[0]["params"][:1])
    except compile_error() as error:
        raise UserError(
            f"`policy.optimizer.name`: the steps of {name} cannot be compiled: {str(error).strip().splitlines()[0]} Compiling "
            "requires a C++ compiler on a CPU and Triton on a GPU. Install it, or use torch.optim.AdamW.",
            key="policy.optimizer.name",
        ) from error
    optimizer.state.clear()
