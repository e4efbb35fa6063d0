"""The parts of an optimizer step: mode of the model, loss of a microbatch, and the error of a step that is not finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rl_backends_base.microbatches import first_non_finite_loss, non_finite_step_error
from rl_backends_base.shards import local
from rl_backends_base.training_state import TrainingStateBase
from rl_core.backend import BatchedDataDict, GlobalCounts
from rl_core.errors import NonFiniteError
from rl_core.interfaces.policy import LossFunction

LossAndMetrics = tuple[torch.Tensor, Mapping[str, torch.Tensor]]


class LossOfMicrobatch:
    """Computes loss and metrics of a microbatch from its scores.

    Args:
        loss_fn: the loss.
        counts: normalizers of the global batch.
        device: device of the model.
    """

    def __init__(self, loss_fn: LossFunction, counts: GlobalCounts, device: torch.device) -> None:
        self._loss_fn, self._device = loss_fn, device
        self._seqs = torch.full((), counts.valid_seqs, dtype=torch.float32, device=device)
        self._toks = torch.full((), counts.valid_toks, dtype=torch.float32, device=device)

    def __call__(self, scored: torch.Tensor, microbatch: BatchedDataDict[Any]) -> LossAndMetrics:
        """Scalar loss with gradient, and metrics.

        Args:
            scored: [b, T], or [b, T, 1 + K] if the loss has candidates.
            microbatch: the rows, on any device.
        """
        batch = microbatch.to(self._device)
        if self._loss_fn.candidates_key is None:
            return self._loss_fn(scored, batch, self._seqs, self._toks)
        # In a new dict, which is freed after the loss, with its graph.
        batch = BatchedDataDict({**batch, "candidate_logprobs": scored[..., 1:]})
        return self._loss_fn(scored[..., 0], batch, self._seqs, self._toks)


@contextmanager
def training_mode(model: nn.Module, *, learn: bool, dropout: bool) -> Iterator[None]:
    """Put `model` into the mode of one forward and, if it learns, backward pass.

    Without dropout, all modules stay in evaluation mode, as for scoring: dropout, layerdrop and router noise are off, and
    log-probabilities equal those of `get_logprobs`. Three kinds of modules still need the training flag: layers that recompute
    activations check it, and cuDNN for recurrent ones, so their own drop probabilities are set to 0 while the block runs; and
    the dropout of LoRA adapters is configured explicitly (`lora.dropout`), so it stays on.

    Args:
        model: the model.
        learn: whether gradients are computed.
        dropout: whether the model's own dropout may be on; see `LossFunction.allows_dropout`.
    """
    model.train(learn and dropout)
    changed: list[tuple[nn.Module, str, float]] = []
    if learn and not dropout:
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False) or isinstance(module, nn.RNNBase):
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


def non_finite_error(
    losses: Sequence[torch.Tensor], state: TrainingStateBase | None, *, norm: float, rank: int
) -> NonFiniteError:
    """The error for the first non-finite value on this rank; clears the gradients."""
    where = "The non-finite value is on another rank; see its error."
    broken = first_non_finite_loss(losses)
    if broken is not None:
        where = f"The loss of microbatch {broken + 1} of {len(losses)} on rank {rank} is {float(losses[broken])}."
    else:
        for name, gradient in state.gradients().items() if state is not None else ():
            if not bool(torch.isfinite(local(gradient)).all()):
                where = f"The losses are finite; the first non-finite gradient on rank {rank} is that of {name}."
                break
    step = 1
    if state is not None:
        state.clear_gradients()
        step = state.weight_version + 1
    return non_finite_step_error(step, where, norm=norm)
