"""Megatron-Core as policy backend; importing it loads nothing heavy until `MegatronPolicy` is accessed."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_backends_megatron.policy import MegatronPolicy

__all__ = ["MegatronPolicy"]

# Irrelevant warnings of every process: about packages that this backend does not need, and about Megatron's own calls.
for _message in (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    r"`torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
    r"\s*The 'megatron.core.transformer.custom_layers",
):
    warnings.filterwarnings("ignore", message=_message)


def __getattr__(name: str) -> Any:
    if name == "MegatronPolicy":
        from rl_backends_megatron.policy import MegatronPolicy

        return MegatronPolicy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
