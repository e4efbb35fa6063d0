"""Model FLOP/s in training, and the fraction of the device's peak that they are (MFU)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import torch

PEAK_TFLOPS: Final[Mapping[str, float]] = {
    "B200": 2250.0,
    "GH200": 989.4,
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.5,
    "H100": 989.4,
    "H800": 989.4,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "MI300X": 1307.4,
}
"""Dense bfloat16 TFLOP/s with float32 accumulation, by the name that torch reports, from the vendors' data sheets and
architecture white papers. Figures that are given with sparsity are halved. The first name that matches counts."""


def peak_tflops(device_name: str | None, precision: str) -> float | None:
    """The published peak of a device in TFLOP/s; None if it is unknown, or not that of `precision`."""
    if device_name is None or precision != "bfloat16":
        return None
    return next((peak for name, peak in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", device_name)), None)


class ModelFlops:
    """FLOPs of the training of one model: its forward and backward pass, without recomputation and optimizer.

    A matrix takes 2 FLOPs per weight and token in the forward pass, 2 for the gradient of its input and, if it is trained, 2
    for its own gradient. In attention, a token and one that it attends to take two products of the width of all heads in each
    of the three. Attention counts as causal over the whole row; norms, activations and softmax are left out.

    Args:
        sizes: what the model's worker reports as `matrix_sizes`: weights that each token is multiplied with (`trained`,
            `frozen`), those of the LM head, which is applied to trained tokens only (`trained_head`, `frozen_head`), and the
            width of all heads of all layers (`attention`). Absent sizes are 0.
        ranks: number of devices that the FLOPs are divided by.
        peak: peak of one device in TFLOP/s; None if it is unknown.
    """

    def __init__(self, sizes: Mapping[str, float], *, ranks: int, peak: float | None) -> None:
        self._sizes, self._ranks, self._peak = sizes, ranks, peak

    def tflop(self, result: Mapping[str, Any]) -> float:
        """Model TFLOPs of a training call; rows without a gradient, which were not computed, do not count.

        Args:
            result: of `TrainableInterface.train`, with `computed_lengths`.
        """
        of = {name: self._sizes.get(name, 0.0) for name in ("trained", "frozen", "trained_head", "frozen_head", "attention")}
        lengths = torch.tensor(result["computed_lengths"], dtype=torch.float64)
        scored: float = result["global_valid_toks"] - result["skipped_valid_toks"]
        pairs = float((lengths * (lengths + 1)).sum()) / 2
        matrices = (6 * of["trained"] + 4 * of["frozen"]) * float(lengths.sum())
        head = (6 * of["trained_head"] + 4 * of["frozen_head"]) * scored
        return (matrices + head + 12 * of["attention"] * pairs) / 1e12

    def metrics(self, result: Mapping[str, Any], seconds: float) -> dict[str, float]:
        """`tflops_per_s` of a training call of this duration and, if the peak is known, `mfu`; empty without lengths."""
        if "computed_lengths" not in result:
            return {}
        speed = self.tflop(result) / seconds / self._ranks
        return {"tflops_per_s": speed} | ({"mfu": speed / self._peak} if self._peak is not None else {})
