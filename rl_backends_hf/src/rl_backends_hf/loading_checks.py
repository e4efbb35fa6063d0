"""Checks of how a model is to be loaded that depend on this machine."""

from __future__ import annotations

import importlib.util
from typing import Any, Final

import torch
import transformers
from transformers import PreTrainedModel

from rl_backends_hf.model_options import HFModelConfig
from rl_backends_hf.static_checks import NEEDS_BITSANDBYTES, NEEDS_FLASH_ATTN
from rl_core.errors import NotSupportedError, UserError

_SPREADING: Final = ("auto", "balanced", "balanced_low_0", "sequential")
"""Device maps of Transformers that use all visible GPUs."""


def check_options(options: HFModelConfig, name: str) -> None:
    """Refuse options that this machine or its installed libraries do not support.

    Raises:
        UserError: a library or a GPU is missing, or the model would be spread over several GPUs.
    """
    for key in ("load_in_8bit", "load_in_4bit"):
        if not getattr(options, key):
            continue
        if importlib.util.find_spec("bitsandbytes") is None:
            raise UserError(NEEDS_BITSANDBYTES.format(key=key), key=key)
        if not torch.cuda.is_available():
            raise UserError(
                f"`{key}` needs a CUDA GPU, but torch {torch.__version__} finds none. Load {name} without `{key}`; "
                "`precision: bfloat16` needs half the memory of float32 on any device.",
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
