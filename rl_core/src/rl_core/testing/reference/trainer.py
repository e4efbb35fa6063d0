"""Optimizer steps of the reference model, with the optimizer of a policy's section."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from rl_core.config.policy_sections import PolicyConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.interfaces.loss import LossFunction
from rl_core.plugins.import_path import resolve
from rl_core.testing.reference.model import Weights, log_distributions, row_logprobs


@dataclass(frozen=True, kw_only=True)
class ReferenceStep:
    """What a step should report."""

    loss: float
    grad_norm: float
    """Before clipping."""
    metrics: dict[str, float]


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
        width = rows["input_ids"].shape[1]
        scores = [
            row_logprobs(self.weights, tokens[:length], temperature=self._section.scoring_temperature)
            for tokens, length in zip(rows["input_ids"], rows["input_lengths"].tolist(), strict=True)
        ]
        return torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in scores])

    @torch.no_grad()
    def top_logprobs(self, tokens: torch.Tensor, k: int) -> torch.Tensor:
        """[T - 1, K] the largest log-probabilities over tokens 1, 2, ... of a row, in descending order."""
        return log_distributions(self.weights, tokens[:-1], temperature=self._section.scoring_temperature).topk(k).values

    def outcome(self, rows: BatchedDataDict[Any], loss_fn: LossFunction) -> ReferenceStep:
        """Loss, gradient and metrics of one step, without taking it; the gradients stay in the weights."""
        self._optimizer.zero_grad()
        seqs, toks = rows["sample_mask"].sum(), (rows["token_mask"] * rows["sample_mask"].unsqueeze(1)).sum()
        loss, metrics = loss_fn(self.logprobs(rows), rows, seqs, toks)
        loss.backward()
        norm = torch.stack([weight.grad.norm() for weight in self.weights.values() if weight.grad is not None]).norm()
        return ReferenceStep(
            loss=float(loss.detach()), grad_norm=float(norm), metrics={name: float(value) for name, value in metrics.items()}
        )

    def train(self, rows: BatchedDataDict[Any], loss_fn: LossFunction) -> ReferenceStep:
        """Take one step."""
        expected = self.outcome(rows, loss_fn)
        if self._section.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(self.weights.values()), self._section.max_grad_norm)
        self._optimizer.step()
        self.version += 1
        return expected

    def state(self) -> Any:
        """Weights, optimizer state and version."""
        weights = {name: weight.detach().clone() for name, weight in self.weights.items()}
        return weights, copy.deepcopy(self._optimizer.state_dict()), self.version

    @torch.no_grad()
    def restore(self, state: Any) -> None:
        """Return to an earlier `state`."""
        weights, optimizer, self.version = state
        for name, weight in self.weights.items():
            weight.copy_(weights[name])
        self._optimizer.load_state_dict(copy.deepcopy(optimizer))
