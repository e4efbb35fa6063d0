"""Reports log-probabilities of greedy rows at the run's temperature; vLLM itself reports them at temperature 1."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from rl_backends_vllm.requests import GREEDY_TEMPERATURE


class GreedyTemperature(LogitsProcessor):
    """Divides the logits of greedy rows by the temperature, which does not change their order."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._temperatures: dict[int, float] = {}

    def is_argmax_invariant(self) -> bool:
        """False, although it is invariant, because vLLM skips invariant processors if all rows are greedy."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Track rows that are added to, removed from and moved in vLLM's batch."""
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
