"""What this backend uses of Transformers beyond its public interface, or under two names; the only module here with such names.

docs/compatibility.md lists them with the releases that have them and the tests.
"""

from __future__ import annotations

import inspect
import re
from contextlib import suppress
from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs


def attention_of(model: PreTrainedModel | PretrainedConfig) -> str:
    """The name of the attention function that a model uses, in `ALL_ATTENTION_FUNCTIONS`."""
    name: str = (model.config if isinstance(model, PreTrainedModel) else model)._attn_implementation
    return name


def takes_other_attention(model: PreTrainedModel) -> bool:
    """Whether a model calls the attention function that its config names, so that it can be replaced."""
    return bool(model._can_set_attn_implementation())


def replace_attention(model: PreTrainedModel, name: str) -> bool:
    """Use our attention function `name` instead of SDPA, if the model allows it; returns whether it is used."""
    if attention_of(model) not in ("sdpa", name) or not takes_other_attention(model):
        return False
    model.set_attn_implementation(name)
    return attention_of(model) == name


def layers_of(text: PretrainedConfig) -> tuple[list[str], list[dict[str, Any]]]:
    """The type of each layer and the arguments of its cache; Transformers 5.16 to 5.18 have one dictionary for all layers."""
    kinds, arguments = get_layer_types_and_kwargs(text)
    return kinds, [arguments] if isinstance(arguments, dict) else arguments


def config_of_each_layer(text: PretrainedConfig) -> list[PretrainedConfig]:
    """The config of each layer; Gemma 4 has other head widths in some, and its own config refuses to name one of them."""
    is_mixed = getattr(text, "is_heterogeneous", False)
    return list(text.per_layer_config) if is_mixed else [text] * text.num_hidden_layers


def cache_layers(text: PretrainedConfig) -> list[Any]:
    """The empty cache of each layer that has one: those with attention have `keys`, those with a state `recurrent_states`."""
    try:
        return list(DynamicCache(config=text).layers)
    except KeyError:  # a type of layer that only the model's own code has
        return []


def head_width(layer: PretrainedConfig) -> int:
    """Entries of a head's query and key, from the config of its layer; 0 heads count as one."""
    return int(getattr(layer, "head_dim", None) or layer.hidden_size // max(1, getattr(layer, "num_attention_heads", 0)))


def names_of_layers(model: torch.nn.Module) -> set[str]:
    """The classes of decoder layers, which stay on one device each."""
    return set(getattr(model, "_no_split_modules", None) or ())


def cache_keyword(model: PreTrainedModel) -> str:
    """The argument of the forward pass that takes the cache: `cache` since Transformers 5.24, `past_key_values` before.

    Transformers 5.40 will not take the old name any more; a model with its own code may have no other. Mamba calls it
    `cache_params`.
    """
    names = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values", "cache_params") if name in names), "past_key_values")


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Recompute each layer's activations in the backward pass; the method was renamed in Transformers 5.23."""
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def read_directly(model: torch.nn.Module) -> dict[str, str]:
    """The linear layers whose weight is read by the code around them, to the name of its class.

    Mamba multiplies with `dt_proj.weight`, and kernels for GPUs take the weights of further layers. What a wrapper or hook adds
    to the output of such a layer has no effect there, and a weight that is stored in another form gives a wrong product.
    """
    found: dict[str, str] = {}
    reading: dict[type, frozenset[str]] = {}
    for name, module in model.named_modules():
        linear = [key for key, child in module.named_children() if isinstance(child, torch.nn.Linear)]
        kind = type(module)
        if linear and kind not in reading:
            reading[kind] = _weights_read_by(kind)
        found |= {f"{name}.{key}": type(module).__name__ for key in linear if key in reading[kind]}
    return found


def _weights_read_by(kind: type) -> frozenset[str]:
    """The attributes whose `weight` the methods of a class read, except to initialize it, or in slices, as Bloom can."""
    code = ""
    for base in kind.__mro__:
        if not base.__module__.startswith(("torch.", "builtins")) and base is not PreTrainedModel:
            with suppress(OSError, TypeError):  # made while the program runs
                code += inspect.getsource(base)
    lines = (line for line in code.splitlines() if "init" not in line)
    return frozenset(re.findall(r"\bself\.(\w+)\.weight\b(?!\[|\.(?:dtype|device|shape))", "\n".join(lines)))
