"""The frozen reference policy: the initial weights, read again from their source when first asked for; knows no training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rl_backends_megatron.config import MegatronPolicyConfig
from rl_backends_megatron.loading import load_model
from rl_backends_megatron.parallel import Ranks


class ReferencePolicy:
    """A second model, divided over the ranks as the policy is; it rests in CPU memory and visits the device while it scores.

    It is read from `model_name`, not copied from the policy: so it is the initial policy after a resume as well, and costs
    nothing before something asks for it. Making one is collective.

    Args:
        config: the policy's section.
        ranks: the ranks.
    """

    def __init__(self, config: MegatronPolicyConfig, ranks: Ranks) -> None:
        self._device = ranks.device
        self._models = load_model(config, ranks).chunks.modules
        for model in self._models:
            model.requires_grad_(False)
            model.to("cpu")

    @contextmanager
    def on_device(self) -> Iterator[list[Any]]:
        """The chunks, on the rank's device for as long as the block runs."""
        for model in self._models:
            model.to(self._device)
        try:
            yield list(self._models)
        finally:
            for model in self._models:
                model.to("cpu")
