"""The frozen reference policy: the initial weights, loaded when first needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rl_backends_megatron.config import MegatronPolicyConfig
from rl_backends_megatron.loading import load_model
from rl_backends_megatron.parallel import Ranks


class ReferencePolicy:
    """A second model, sharded like the policy. It is kept in CPU memory and moved to the device while it scores.

    It is loaded from `model_name`, not copied from the policy, so it is also the initial policy after a resume, and costs
    nothing if it is not used. Its construction is collective.

    Args:
        config: the section `policy`.
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
        """The chunks, on the rank's device while the block runs."""
        for model in self._models:
            model.to(self._device)
        try:
            yield list(self._models)
        finally:
            for model in self._models:
                model.to("cpu")
