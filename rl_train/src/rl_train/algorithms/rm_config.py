"""The section `rm`. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from rl_core.config.source_tree import KeyPath
from rl_train.algorithms.pairs_config import PairsConfig
from rl_train.config.schema import RunConfig


class RewardModelConfig(PairsConfig):
    """Reward model training on preferences."""

    default_loss: ClassVar[str] = "bradley_terry"
    head: ClassVar[Literal["tokens", "scalar"]] = "scalar"

    def conflicts(self, run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
        if run.loss_fn.head != "scalar":
            yield (
                ("loss_fn", "name"),
                f"{run.loss_fn.name} needs log-probabilities of tokens, but a reward model only returns scores: remove it, or "
                "use bradley_terry.",
            )
        if run.policy.generation is not None:
            yield ("policy", "generation"), "reward model training does not sample: remove the section."
        yield from super().conflicts(run)
