"""Checks before a model is loaded: what this machine supports, and what Transformers drops from a GGUF file.

Metadata and tensors of a GGUF file that change the model are restored, or the file is refused.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import PreTrainedModel

from rl_backends_hf.model_options import HFModelConfig
from rl_backends_hf.static_checks import NEEDS_BITSANDBYTES, NEEDS_FLASH_ATTN
from rl_backends_hf.transformers_internals import config_of_each_layer, head_width
from rl_core.errors import NotSupportedError, UserError

_SPREADING: Final = ("auto", "balanced", "balanced_low_0", "sequential")
"""Device maps of Transformers that use all visible GPUs."""


def check_options(options: HFModelConfig, name: str) -> None:
    """Refuse options that this machine or its installed libraries do not support.

    Raises:
        UserError: a library or a GPU is missing, or the model would be spread over several GPUs.
    """
    if (key := options.quantized_by) is not None:
        if importlib.util.find_spec("bitsandbytes") is None:
            raise UserError(NEEDS_BITSANDBYTES.format(key=key), key=key)
        if Path(name).suffix == ".gguf":
            raise UserError(
                f"`{key}`: {name} is a GGUF file, whose weights are dequantized when it is loaded. Use the "
                "folder of the model that the file was made from.",
                key=key,
            )
    _check_device_map(options.device_map)
    if options.attn_implementation == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        raise UserError(NEEDS_FLASH_ATTN, key="attn_implementation")


def _check_device_map(device_map: str | dict[str, Any] | None) -> None:
    if isinstance(device_map, str) and device_map.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(
            f"`device_map: {device_map}` needs a CUDA GPU, but torch {torch.__version__} finds none. "
            "Leave device_map out to use the rank's device.",
            key="device_map",
        )
    gpus = torch.cuda.device_count() if device_map in _SPREADING else 0
    if isinstance(device_map, dict):
        gpus = len({str(device) for device in device_map.values()} - {"cpu", "disk"})
    if gpus > 1:
        raise UserError(
            f"`device_map: {device_map}` would spread the layers over {gpus} GPUs, of which only one at a time computes, and "
            "losses and samplers expect the model on one device. For a model that is too large for one GPU, remove device_map "
            "and use one rank per GPU: `data_parallel: fsdp2` with `cluster.workers_per_node`, or `backend: megatron`, and "
            "`tensor_parallel_size` of vLLM for the engine. Otherwise, set `device_map: cuda`.",
            key="device_map",
        )


def check_not_offloaded(model: PreTrainedModel, name: str) -> None:
    """Refuse a model of which a device map left tensors on disk or in CPU memory.

    Raises:
        UserError: there are such tensors.
    """
    offloaded = [key for key, parameter in model.named_parameters() if parameter.device.type == "meta"]
    if offloaded:
        raise UserError(
            f"`device_map` offloaded {len(offloaded)} tensors of {name} (the first: {offloaded[0]}) to disk or CPU memory "
            "because the GPU is too small. Such a model can be neither trained nor exported. Use more GPUs with "
            "`data_parallel: fsdp2`, a smaller model, or no device_map.",
            key="device_map",
        )


def check_norms(model: PreTrainedModel, name: str) -> None:
    """Refuse a Mamba 2 of several groups if its class normalizes over all channels.

    The published models normalize per group (https://arxiv.org/abs/2405.21060), as Transformers does from 5.24 on.

    Raises:
        NotSupportedError: it would be another model.
    """
    groups = getattr(model.config, "n_groups", 1)
    if model.config.model_type != "mamba2" or groups == 1 or any(hasattr(each, "group_size") for each in model.modules()):
        return
    raise NotSupportedError(
        f"{name} is a Mamba 2 with {groups} groups (`n_groups`), which normalizes each group on its own. Transformers "
        f"{transformers.__version__} normalizes over all channels, which is another model. Use one with one group.",
        key="model_name",
    )


_ROPE: Final = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_UNSCALED: Final = (0.0, 1.0)
"""Factors of rope scaling with which llama.cpp scales nothing."""
_SHAPES: Final = {
    "block_count", "embedding_length", "feed_forward_length", "expert_count", "expert_feed_forward_length", "vocab_size",
    "expert_shared_feed_forward_length", "context_length", "tensor_data_layout", "rope.scaling.type", "rope.scaling.finetuned",
}  # fmt: skip
"""Keys that the shapes of the tensors state too, or that have no effect by themselves."""


def restore_config(config: Any, file: Path) -> None:
    """Add the rope scaling of a GGUF file to the config that Transformers read from it.

    Raises:
        UserError: Transformers does not read a value of the file, or reads another one.
    """
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, read_gguf_metadata

    metadata, tensors = read_gguf_metadata(str(file))
    family, text = metadata["general.architecture"], config.get_text_config()
    values = {key.removeprefix(f"{family}."): value for key, value in metadata.items() if key.startswith(f"{family}.")}
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    scaling, kind = {}, values.get("rope.scaling.type", "linear")
    if kind in ("linear", "yarn") and values.get("rope.scaling.factor", 0.0) not in _UNSCALED and "rope_theta" in rope:
        keys = _ROPE if kind == "yarn" else ("rope.scaling.factor",)
        scaling = {"rope_type": kind, **{_ROPE[key]: values.pop(key) for key in keys if key in values}}
    if "rope_freqs.weight" in tensors:
        scaling = _llama3_scaling(rope.get("rope_theta"), file)
    head = head_width(config_of_each_layer(text)[0])
    read = {"attention.key_length": head, "attention.value_length": head, "rope.freq_base": rope.get("rope_theta")}
    read |= {"rope.dimension_count": head * rope.get("partial_rotary_factor", 1), "rope.scaling.factor": 1.0}
    read |= {"rope.scaling.original_context_length": values.get("context_length")}
    known: dict[str, Any] = next((GGUF_CONFIG_MAPPING[n] for n in GGUF_CONFIG_MAPPING if _plain(n) == _plain(family)), {})
    taken = _SHAPES | {key for key, field in known.items() if field is not None}
    for key in values if family not in GGUF_CONFIG_ARCHS else ():
        # Other fields of the config have the last word of their key as their name, such as `sliding_window`.
        field = read[key] if key in read else getattr(text, key.rpartition(".")[2], None)
        if key not in taken and values[key] and not _equal(values[key], field):
            raise _refused(file, f"`{family}.{key}` ({values[key]})")
    if other := next((name for name in tensors if name.startswith("rope_factors_")), None):
        raise _refused(file, f"the tensor {other}")
    rope.update(scaling)


def _llama3_scaling(theta: Any, file: Path) -> dict[str, Any]:
    """The parameters of Llama 3.1's scaling that give the file's divisors of the rotary frequencies."""
    from gguf import GGUFReader

    divisors = next(tensor.data for tensor in GGUFReader(file).tensors if tensor.name == "rope_freqs.weight").tolist()
    factor = max(divisors)
    for original in (2**power for power in range(6, 18)) if theta else ():
        turns = (original / (2 * math.pi * theta ** (index / len(divisors))) for index in range(len(divisors)))
        kept = (min(1.0, max(0.0, (each - 1.0) / 3.0)) for each in turns)
        if all(_equal(divisor, 1 / ((1 - share) / factor + share)) for divisor, share in zip(divisors, kept, strict=True)):
            own = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": original}
            return {"rope_type": "llama3", "factor": factor, **own}
    raise _refused(file, "the tensor rope_freqs.weight")


def _plain(name: str) -> str:
    return name.replace("-", "").replace("_", "")


def _equal(value: Any, other: Any) -> bool:
    numbers = isinstance(value, int | float) and isinstance(other, int | float)
    return math.isclose(value, other, rel_tol=1e-5) if numbers else bool(value == other)


def _refused(file: Path, what: str) -> UserError:
    return UserError(
        f"{file}: Transformers does not read {what}, so it would compute another model than the one in the file. Use the "
        "folder of the model that the file was made from, with its safetensors and tokenizer.",
        key="model_name",
    )
