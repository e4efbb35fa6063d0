"""The section `dpo`. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from rl_core.config.source_tree import KeyPath
from rl_train.algorithms.losses.config import ClippedPGLossConfig, NLLLossConfig
from rl_train.algorithms.pairs_config import PairsConfig
from rl_train.config.schema import RunConfig


class DPOConfig(PairsConfig):
    """Direct preference optimization (DPO) and its variants."""

    default_loss: ClassVar[str] = "dpo"

    def conflicts(self, run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
        if isinstance(run.loss_fn, ClippedPGLossConfig | NLLLossConfig):
            yield (
                ("loss_fn", "name"),
                f"{run.loss_fn.name} does not use pairs of answers, so dpo cannot use it. Use dpo, ipo, dpo_hinge, simpo or "
                "orpo.",
            )
        yield from super().conflicts(run)
