"""The GPUs that `rlcore plan --gpu` and `rlcore init --gpus` know by name, with the figures of their vendor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rl_core.errors import UserError
from rl_train.metrics.model_flops import PEAK_TFLOPS
from rl_train.sizes import parse_size


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU.

    Attributes:
        name: Name of the model, a key of `PEAK_TFLOPS`.
        memory: Bytes of its memory.
        float32: Peak TFLOP/s in float32, without TF32.
        bandwidth: Bytes per second that it reads from its memory.
        link: Bytes per second that it sends to another GPU of its node: half of NVLink's figure, which counts both
            directions, or that of its PCIe interface.
        utilization: Assumed fraction of the peak that passes over microbatches reach.
    """

    name: str
    memory: int
    float32: float
    bandwidth: float
    link: float
    utilization: float = 0.40

    def flops(self, precision: str) -> float:
        """FLOP/s that passes are assumed to reach."""
        return self.utilization * 1e12 * (self.float32 if precision == "float32" else PEAK_TFLOPS[self.name])


_GIB: Final = 2**30
_A100: Final = 0.54
GPUS: Final[Mapping[str, Gpu]] = {
    "a10": Gpu(name="A10", memory=24 * _GIB, float32=31.2, bandwidth=0.600e12, link=32e9),
    "a40": Gpu(name="A40", memory=48 * _GIB, float32=37.4, bandwidth=0.696e12, link=56e9),
    "a100": Gpu(name="A100", memory=80 * _GIB, float32=19.5, bandwidth=2.039e12, link=300e9, utilization=_A100),
    "a100-40gb": Gpu(name="A100", memory=40 * _GIB, float32=19.5, bandwidth=1.555e12, link=300e9, utilization=_A100),
    "b200": Gpu(name="B200", memory=178 * _GIB, float32=75.0, bandwidth=7.7e12, link=900e9),
    "h100": Gpu(name="H100", memory=80 * _GIB, float32=67.0, bandwidth=3.35e12, link=450e9),
    "h100-pcie": Gpu(name="H100 PCIe", memory=80 * _GIB, float32=51.0, bandwidth=2.0e12, link=64e9),
    "h200": Gpu(name="H200", memory=140 * _GIB, float32=67.0, bandwidth=4.8e12, link=450e9),
    "l4": Gpu(name="L4", memory=24 * _GIB, float32=30.3, bandwidth=0.300e12, link=32e9),
    "l40s": Gpu(name="L40S", memory=48 * _GIB, float32=91.6, bandwidth=0.864e12, link=32e9),
    "rtx3090": Gpu(name="RTX 3090", memory=24 * _GIB, float32=35.6, bandwidth=0.936e12, link=32e9),
    "rtx4090": Gpu(name="RTX 4090", memory=24 * _GIB, float32=82.6, bandwidth=1.008e12, link=32e9),
}
"""GPUs by the name that users write, from NVIDIA's data sheets and architecture white papers; SXM modules, if there are any.

The utilization is 38 to 43 % on H100 (https://arxiv.org/abs/2407.21783, table 4) and 54.2 % on A100
(https://arxiv.org/abs/2205.05198, abstract). For the others, that of H100 is assumed.
"""


def parse_gpu(text: str, option: str) -> Gpu | int:
    """A GPU by its name, such as `h100`, or the bytes of a size such as `80GiB`.

    Raises:
        UserError: It is neither; lists the names.
    """
    name = text.strip().lower().replace(" ", "")
    if name in GPUS:
        return GPUS[name]
    if name[:1].isdigit():
        return parse_size(text, option)
    raise UserError(f"{option} {text} is not a known GPU. Write a size such as 80GiB, or one of: {', '.join(GPUS)}.")
