"""Compiles decoder layers with `torch.compile`; see `hf_cfg.compile_layers`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from transformers import PreTrainedModel

from rl_backends_hf.model import decoder_layers
from rl_backends_hf.torch_internals import compile_error
from rl_core.errors import NotSupportedError, UserError

_KEY: Final = "policy.hf_cfg.compile_layers"


def compile_layers(model: PreTrainedModel, *, float32_products: bool) -> None:
    """Compile each decoder layer when it is first called, once for all lengths.

    Args:
        model: the model.
        float32_products: whether products of bfloat16 matrices are replaced.

    Raises:
        NotSupportedError: the model's class does not name its layers.
        UserError: products are replaced.
    """
    if float32_products:
        raise UserError(
            "`compile_layers` has no effect on a CPU that multiplies bfloat16 matrices in float32 (`cpu_products`): torch does "
            "not compile replaced products. Remove it, or set `policy.precision: float32`.",
            key=_KEY,
        )
    layers = decoder_layers(model)
    if not layers:
        raise NotSupportedError(
            f"{type(model).__name__} does not name its decoder layers in Transformers, so they cannot be compiled. Set "
            f"`{_KEY}: false`.",
            key=_KEY,
        )
    for layer in layers:
        layer.compile(dynamic=True)


@contextmanager
def explaining_compilation(model: PreTrainedModel) -> Iterator[None]:
    """Raise a `UserError` if the layers of `model` cannot be compiled while the block calls them."""
    try:
        yield
    except compile_error() as error:
        raise UserError(
            f"The layers of {type(model).__name__} cannot be compiled on {model.device}: {str(error).strip().splitlines()[0]} "
            f"Compiling requires a C++ compiler on a CPU and Triton on a GPU. Install it, or set `{_KEY}: false`.",
            key=_KEY,
        ) from error
