"""A loss that trains on older rollouts as if the current weights had sampled them; `rlcore validate` refuses built-in ones."""

from __future__ import annotations

from pathlib import Path

from rl_core.plugins import Component, hookimpl
from rl_train.algorithms.losses.config import ClippedPGLossConfig

_ENTRY_POINT = "[rl_core.plugins]\nuncorrected = uncorrected\n"


class UncorrectedLossConfig(ClippedPGLossConfig):
    """The section of the loss. With one optimizer step per step, the ratio is 1 and nothing depends on the sampler."""

    @property
    def corrects_for_older_weights(self) -> bool:
        """Wrong on purpose."""
        return True


@hookimpl
def rlcore_losses() -> list[Component]:
    """The built-in policy-gradient loss with these settings."""
    return [
        Component(
            "uncorrected",
            target="rl_train.algorithms.losses.policy_gradient:ClippedPGLossFn",
            config="uncorrected:UncorrectedLossConfig",
            summary="Policy gradient without a correction for older rollouts",
        )
    ]


def install(folder: Path) -> None:
    """Write the metadata by which commands with this folder and that of this module in `PYTHONPATH` discover the plugin."""
    info = folder / "uncorrected-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: uncorrected\nVersion: 0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(_ENTRY_POINT, encoding="utf-8")
