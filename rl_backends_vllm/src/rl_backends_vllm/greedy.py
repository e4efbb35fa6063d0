"""Greedy rows with log-probabilities at the run's temperature: vLLM gives those of greedy rows at temperature 1."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from rl_backends_vllm.requests import GREEDY_TEMPERATURE


class GreedyTemperature(LogitsProcessor):
    """Divides the logits of greedy rows by their temperature, which leaves their order as it is."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._temperatures: dict[int, float] = {}

    def is_argmax_invariant(self) -> bool:
        """False, although it is: vLLM leaves invariant processors out where all rows are greedy."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow rows that come, go and move in vLLM's batch."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._temperatures.pop(index, None)
        for index, params, _, _ in batch_update.added:
            temperature = (params.extra_args or {}).get(GREEDY_TEMPERATURE)
            self._set(index, temperature)
        for source, target, direction in batch_update.moved:
            moved, replaced = self._temperatures.pop(source, None), self._temperatures.pop(target, None)
            self._set(target, moved)
            if direction == MoveDirectionality.SWAP:
                self._set(source, replaced)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, temperature in self._temperatures.items():
            logits[index].div_(temperature)
        return logits

    def _set(self, index: int, temperature: float | None) -> None:
        self._temperatures.pop(index, None)
        if temperature is not None:
            self._temperatures[index] = temperature
