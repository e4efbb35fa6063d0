"""Builds the optimizer that the config names; knows parameters, no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rl_core.config.schema import OptimizerConfig
from rl_core.errors import UserError
from rl_core.plugins.dotted import resolve
from rl_core.training.named import call

DECAY_MATRICES_ONLY = "decay_matrices_only"
"""A keyword of ours in `optimizer.kwargs`: true spares biases and norms (all tensors of one axis) the weight decay."""


def build_optimizer(parameters: Mapping[str, torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer over the trainable parameters.

    Adam and AdamW of torch run fused (one pass over memory) unless `kwargs` say otherwise.

    Args:
        parameters: name to parameter, those that are stepped on.
        config: dotted name and keyword arguments.

    Raises:
        UserError: the name leads nowhere, or the optimizer refuses the arguments.
    """
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
    optimizer = call(factory, groups, kwargs, key="policy.optimizer", also=(DECAY_MATRICES_ONLY,))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"`policy.optimizer.name`: {config.name} gave a {type(optimizer).__name__}, no torch optimizer.")
    return optimizer
