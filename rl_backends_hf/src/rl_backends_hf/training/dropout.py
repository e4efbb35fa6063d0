"""Disables the model's own dropout in training, for losses that compare log-probabilities with those of another pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def training_mode(model: nn.Module, *, learn: bool, dropout: bool) -> Iterator[None]:
    """Put `model` into the mode of one forward and backward pass.

    Without dropout, all modules stay in evaluation mode, as for scoring: dropout, layerdrop and router noise are off, and
    log-probabilities equal those of `get_logprobs`. Two kinds of modules still need the training flag: layers that recompute
    activations check it, so their own drop probabilities are set to 0 while the block runs; and the dropout of LoRA adapters is
    configured explicitly (`lora.dropout`), so it stays on.

    Args:
        model: the model.
        learn: whether gradients are computed.
        dropout: whether the model's own dropout may be on; see `LossFunction.allows_dropout`.
    """
    model.train(learn and dropout)
    changed: list[tuple[nn.Module, str, float]] = []
    if learn and not dropout:
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.training = True
                changed += [(module, name, value) for name, value in _drop_probabilities(module)]
            adapter: Any = getattr(module, "lora_dropout", None)
            if isinstance(adapter, nn.Module):
                module.training = True
                adapter.train()
    for module, name, _ in changed:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


def _drop_probabilities(module: nn.Module) -> list[tuple[str, float]]:
    """Attributes of the module itself such as `dropout`, `activation_dropout` or `layerdrop`."""
    return [(name, value) for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
