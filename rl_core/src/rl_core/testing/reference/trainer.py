"""Optimizer steps of the reference model, with the optimizer of a policy's section."""

from __future__ import annotations

from typing import Any

import torch

from rl_core.config.policy_sections import PolicyConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.loss import LossFunction
from rl_core.plugins.import_path import resolve
from rl_core.testing.reference.model import Weights, logprobs


class ReferenceTrainer:
    """Trains the reference model: one pass for all rows of a step, with gradients by autograd.

    Args:
        weights: of version 0.
        section: the policy's, for optimizer, temperature and clipping.
    """

    def __init__(self, weights: Weights, section: PolicyConfig) -> None:
        self.weights = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
        self.version = 0
        self._section = section
        factory: Any = resolve(section.optimizer.name, key="policy.optimizer.name")
        self._optimizer = factory(list(self.weights.values()), **section.optimizer.kwargs)

    def logprobs(self, rows: BatchedDataDict[Any]) -> torch.Tensor:
        """[B, T] float32 at the scoring temperature, in nats; 0.0 at position 0 and on padding."""
        ids, lengths = rows["input_ids"], rows["input_lengths"]
        return logprobs(self.weights, ids, lengths, temperature=self._section.scoring_temperature)

    def outcome(self, rows: BatchedDataDict[Any], loss_fn: LossFunction) -> dict[str, float]:
        """What a step should report, without taking it; `grad_norm` is before clipping. The gradients stay in the weights."""
        self._optimizer.zero_grad()
        seqs, toks = rows["sample_mask"].sum(), (rows["token_mask"] * rows["sample_mask"].unsqueeze(1)).sum()
        loss, metrics = loss_fn(self.logprobs(rows), rows, seqs, toks)
        loss.backward()
        norm = torch.stack([weight.grad.norm() for weight in self.weights.values() if weight.grad is not None]).norm()
        numbers = {"loss": loss.detach(), "grad_norm": norm, "global_valid_seqs": seqs, "global_valid_toks": toks, **metrics}
        return {name: float(value) for name, value in numbers.items()}

    def train(self, rows: BatchedDataDict[Any], loss_fn: LossFunction) -> dict[str, float]:
        """Take one step."""
        expected = self.outcome(rows, loss_fn)
        if self._section.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(self.weights.values()), self._section.max_grad_norm)
        self._optimizer.step()
        self.version += 1
        return expected
