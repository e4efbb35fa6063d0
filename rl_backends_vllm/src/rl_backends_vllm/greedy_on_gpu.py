"""Log-probabilities of greedy rows at the run's temperature, for the second model runner, which vLLM uses on GPUs."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor, LogitsProcRequestState

from rl_backends_vllm.requests import GREEDY_TEMPERATURE


class GreedyTemperature(LogitsProcessor):
    """Divides the logits of greedy rows by the temperature, which does not change their order."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        # Indexed by the row's slot in the batch; 1 for rows without a temperature.
        self._temperatures = torch.ones(req_states.max_num_reqs, dtype=torch.float32, device=req_states.device)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Register a row in its slot; returns whether its logits are changed."""
        temperature = (sampling_params.extra_args or {}).get(GREEDY_TEMPERATURE)
        self._temperatures[req_idx] = 1.0 if temperature is None else temperature
        return temperature is not None

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Divide logits [N, V] float32 by the temperature of each greedy row, in place."""
        return logits.div_(self._temperatures[ctx.expanded_idx_mapping].unsqueeze(1))
