"""The frozen reference policy: the initial weights, loaded when first needed.

With adapters, it is the policy's own model with the adapters disabled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from rl_backends_hf.compiled_layers import compile_layers
from rl_backends_hf.config import HFPolicyConfig
from rl_backends_hf.cpu_attention import use_cpu_sdpa
from rl_backends_hf.model import DTYPES, load_model
from rl_backends_hf.parallel import Parallel, load_sharded
from rl_backends_hf.scoring.scoring_model import ScoringModel
from rl_backends_hf.scoring.token_scoring import TokenScoring
from rl_backends_hf.training.lora import LoraAdapters


class Reference(Protocol):
    """A model with the initial policy's weights."""

    def on_device(self) -> AbstractContextManager[ScoringModel]:
        """The model, ready to score on the rank's device while the block runs."""


class FrozenBase:
    """The policy's own model with its adapters disabled; needs no second copy of the weights.

    Args:
        scoring: the policy's model.
        adapters: its adapters.
    """

    def __init__(self, scoring: ScoringModel, adapters: LoraAdapters) -> None:
        self._scoring, self._adapters = scoring, adapters

    @contextmanager
    def on_device(self) -> Iterator[ScoringModel]:
        with self._adapters.disabled(), torch.no_grad():
            yield self._scoring.eval()


class ReferencePolicy:
    """A second model that is kept in CPU memory and moved to the device while it scores.

    It is loaded from `model_name`, not copied from the policy, so it is also the initial policy after a resume, and costs
    nothing if it is not used.

    Args:
        config: the section `policy`.
        parallel: how the ranks share a model.
        temperature: logits are divided by it.
        attention: attention function of the policy.
    """

    def __init__(self, config: HFPolicyConfig, parallel: Parallel, *, temperature: float, attention: str) -> None:
        def make_scoring(model: PreTrainedModel) -> ScoringModel:
            return TokenScoring(model, chunk_tokens=config.hf_cfg.logprob_chunk_tokens, temperature=temperature)

        source: dict[str, Any] = {"options": config.hf_cfg, "dtype": DTYPES[config.dtype_name]}
        if parallel.shards:
            self._scoring = load_sharded(config.model_name, make_scoring, parallel=parallel, trainable=False, **source)
        else:
            self._scoring = make_scoring(load_model(config.model_name, device="cpu", **source))
            parallel.distribute(self._scoring, trainable=False)
        if parallel.device.type == "cpu":
            use_cpu_sdpa(self._scoring.model)
        else:
            # The rows are laid out for the policy's attention.
            self._scoring.model.set_attn_implementation(attention)
        if config.hf_cfg.compile_layers:
            compile_layers(self._scoring.model, float32_products=False)
        self._parallel = parallel
        self._moves_to_device = not parallel.shards and config.hf_cfg.device_map is None and parallel.device.type != "cpu"
        self._on_host: list[tuple[torch.Tensor, torch.Tensor]] = []
        """The weights and their pinned memory, which stays when they are copied to the device."""
        if self._moves_to_device:
            weights = (*self._scoring.parameters(), *self._scoring.buffers())
            self._on_host = [(weight, weight.data.pin_memory()) for weight in weights]

    @contextmanager
    def on_device(self) -> Iterator[ScoringModel]:
        for weight, host in self._on_host:
            weight.data = host.to(self._parallel.device, non_blocking=True)
        try:
            with torch.no_grad():
                yield self._scoring.eval()
        finally:
            self._parallel.after_forward(self._scoring)
            for weight, host in self._on_host:
                weight.data = host
