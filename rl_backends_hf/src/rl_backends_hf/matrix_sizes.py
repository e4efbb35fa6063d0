"""Sizes of the matrices that a model multiplies with, from which a run computes the FLOPs of its training."""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from rl_backends_base.adapters import fused_experts
from rl_backends_hf.pictures import language_model
from rl_backends_hf.quantized import QuantizedLinear
from rl_backends_hf.transformers_internals import cache_layers, config_of_each_layer, head_width


def matrix_sizes(model: PreTrainedModel) -> dict[str, float]:
    """The fact `matrix_sizes` of `PolicyWorker.setup`.

    Embeddings are read, not multiplied with; norms, biases and updates of recurrent states are left out. Of experts, those
    chosen for a token count. A vision tower is left out, because it is computed for each picture, not for each token.

    Args:
        model: on any device, sharded or not, with or without adapters.
    """
    config = model.config.get_text_config()
    head = getattr(model.get_output_embeddings(), "weight", None)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    sizes: Counter[str] = Counter()
    packed = {layer.weight: layer.form() for layer in model.modules() if isinstance(layer, QuantizedLinear)}
    experts_of = {
        id(factor): getattr(wrapper, "num_experts", 1)  # in peft, the adapters of all experts of a layer are one matrix
        for wrapper in model.modules()
        if hasattr(wrapper, "lora_A")
        for factor in (*wrapper.lora_A.parameters(), *wrapper.lora_B.parameters())
    }
    experts_of |= {id(parameter): len(parameter) for parameter in fused_experts(model).values()}
    parameters = dict.fromkeys([*language_model(model).parameters(), *([] if head is None else [head])])
    for parameter in parameters:
        weight = packed.get(parameter, parameter)
        kind = "trained" if parameter.requires_grad else "frozen"
        if head is not None and parameter is head:
            sizes[f"{kind}_head"] += parameter.numel()
        elif parameter.ndim > 1 and id(parameter) not in embeddings:
            experts = experts_of.get(id(parameter), 1)
            chosen = getattr(config, "num_experts_per_tok", None) or 1
            sizes[kind] += weight.numel() * min(chosen, experts) // experts
    layers = zip_longest(config_of_each_layer(config), cache_layers(config))  # layers without a cache read that of others
    attending = [layer for layer, cache in layers if layer is not None and (cache is None or hasattr(cache, "keys"))]
    return {**sizes, "attention": sum(map(_attention_width, attending))}


def _attention_width(layer: PretrainedConfig) -> float:
    """Number of heads times their width; the mean of keys and values if they differ, as in multi-head latent attention."""
    width = head_width(layer)
    keys = getattr(layer, "qk_head_dim", None) or width
    return float(getattr(layer, "num_attention_heads", 0)) * (keys + (getattr(layer, "v_head_dim", None) or keys)) / 2
