"""Linear layers whose frozen weight is stored in 4 or 8 bits by bitsandbytes, and the bytes that such weights take.

A layer computes with its weight dequantized to the model's dtype, forward and backward (QLoRA, Dettmers et al. 2023,
https://arxiv.org/abs/2305.14314, equation 5), on every device and for both widths. Log-probabilities and gradients thus equal
those of a model with the dequantized weights, bit for bit. The layers of bitsandbytes differ from it: in evaluation mode, one
repacks 4-bit weights on CPUs with AVX512-BF16, the other rounds activations to 8 bits
(https://arxiv.org/abs/2208.07339).
"""

from __future__ import annotations

import logging
from typing import Any, Final

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from rl_backends_hf.model_options import HFModelConfig
from rl_backends_hf.transformers_internals import read_directly
from rl_core.errors import NotSupportedError

_BLOCK: Final = 64
"""Weights of a 4-bit layer that share a scale."""
_DOUBLE_BLOCK: Final = 256
"""Scales that share a second scale with `quantization.double`."""
_TABLE_BYTES: Final = 64
"""The 16 float32 values of a 4-bit layer."""

# bitsandbytes looks for a kernel of another package when it is imported, which is used by its own layers only.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


class QuantizedLinear(nn.Linear):
    """A frozen linear layer with the parameter `weight` of bitsandbytes, which also has the scales.

    Attributes:
        full_dtype: dtype of the dequantized weight.
    """

    full_dtype: torch.dtype

    def full_weight(self) -> torch.Tensor:
        """The dequantized weight [out, in], a new tensor."""
        from bitsandbytes import functional

        weight: Any = self.weight
        if weight.dtype == torch.int8:
            full: torch.Tensor = functional.int8_vectorwise_dequant(weight.data, weight.SCB)
        else:
            full = functional.dequantize_4bit(weight.data, weight.quant_state)
        return full.to(self.full_dtype)

    @property
    def quantization(self) -> str:
        """`int8`, `nf4` or `fp4`, with `, double` if the scales are quantized."""
        state = getattr(self.weight, "quant_state", None)
        return "int8" if state is None else f"{state.quant_type}{', double' if state.nested else ''}"

    def form(self) -> torch.Tensor:
        """A tensor of the shape and dtype of the dequantized weight, without data."""
        return torch.empty(self.out_features, self.in_features, dtype=self.full_dtype, device="meta")

    def dequantize(self) -> None:
        """Become a plain layer with the dequantized weight."""
        self.weight = nn.Parameter(self.full_weight(), requires_grad=False)
        self.__class__ = nn.Linear  # type: ignore[assignment]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _Product.apply(input, self)  # type: ignore[no-untyped-call]
        return output


class _Product(torch.autograd.Function):
    """The layer's output; the weight is dequantized again for the gradient instead of being kept."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, layer: QuantizedLinear) -> torch.Tensor:
        ctx.layer = layer
        return nn.functional.linear(input, layer.full_weight(), layer.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] @ ctx.layer.full_weight(), None


def quantization_of(model: PreTrainedModel, options: HFModelConfig, dtype: torch.dtype) -> transformers.BitsAndBytesConfig:
    """The argument `quantization_config` of `from_pretrained` for a model, which may have no weights."""
    return transformers.BitsAndBytesConfig(
        llm_int8_skip_modules=_kept(model),
        load_in_8bit=options.load_in_8bit,
        load_in_4bit=options.load_in_4bit,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_type=options.quantization.type,
        bnb_4bit_use_double_quant=options.quantization.double,
    )


def use_dequantized_products(model: PreTrainedModel) -> None:
    """Replace the layers of bitsandbytes in a model that Transformers has quantized, in place."""
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    model.hf_quantizer.remove_quantization_config(model)  # it belongs to the layers that are replaced
    for layer in model.modules():
        if isinstance(layer, Linear4bit | Linear8bitLt):
            layer.weight.CB = None  # of 8 bits: a second reference to the weight
            layer.__class__ = QuantizedLinear
            layer.full_dtype = model.dtype


def is_quantized(model: nn.Module) -> bool:
    """Whether weights are quantized, so that an optimizer cannot update them."""
    return any(isinstance(module, QuantizedLinear) for module in model.modules())


def num_weights(model: nn.Module) -> int:
    """Number of weights of a model, with or without quantized layers."""
    packed = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    stored = sum(parameter.numel() for parameter in model.parameters())
    return stored + sum(layer.in_features * layer.out_features - layer.weight.numel() for layer in packed)


def _kept(model: PreTrainedModel) -> list[str]:
    """Modules that are not quantized: the LM head and those whose weight the code around them reads."""
    return [*HfQuantizer.get_modules_to_not_convert(model), *read_directly(model)]


def layers_to_quantize(model: PreTrainedModel, options: HFModelConfig) -> list[nn.Linear]:
    """The layers of a plain model, possibly without weights, that are quantized when it is loaded: none without such options.

    Raises:
        NotSupportedError: the options ask for it, and no layer can be quantized.
    """
    key = options.quantized_by
    if key is None:
        return []
    kept = _kept(model)
    layers = [layer for name, layer in model.named_modules() if type(layer) is nn.Linear and should_convert_module(name, kept)]
    if not layers or any(isinstance(module, Conv1D) for module in model.modules()):
        raise NotSupportedError(
            f"`{key}`: the layers of a {type(model).__name__} cannot be quantized: they are not plain linear layers. Remove "
            f"{key}; `precision: bfloat16` needs half the memory of float32.",
            key=f"policy.hf_cfg.{key}",
        )
    return layers


def quantized_bytes(layer: nn.Linear, options: HFModelConfig) -> int:
    """Bytes of the weight of a layer that `layers_to_quantize` names, with its scales."""
    weights = layer.in_features * layer.out_features
    if options.load_in_8bit:
        return weights + 4 * layer.out_features
    blocks = -(-weights // _BLOCK)
    scales = blocks + 4 * -(-blocks // _DOUBLE_BLOCK) + 4 if options.quantization.double else 4 * blocks
    return -(-weights // 2) + scales + _TABLE_BYTES
