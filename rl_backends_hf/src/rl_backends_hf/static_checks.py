"""Checks of `hf_cfg` that need neither torch nor the model's weights: model folder and libraries."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

from rl_backends_base.adapter_folder import adapter_as_model
from rl_backends_hf.model_options import HFConfig, HFModelConfig
from rl_core.config.diagnostics import KeyPath
from rl_core.config.schema import GenerationConfig, PolicyConfig
from rl_core.config.section import model_path_problem
from rl_core.errors import UserError

NEEDS_BITSANDBYTES = (
    "`{key}` needs bitsandbytes, which is not installed. Install it with `pip install 'rl-backends-hf[quantized]'`, or leave "
    "`{key}` out."
)
NEEDS_FLASH_ATTN = (
    "`attn_implementation: flash_attention_2` needs the package flash-attn, which is not installed. Use `sdpa`, the default, "
    "or install flash-attn on a machine with a CUDA GPU."
)


def model_problems(
    section: PolicyConfig | GenerationConfig, hf_cfg: Callable[[], HFModelConfig]
) -> Iterator[tuple[KeyPath, str]]:
    """Problems with a model's path and loading options, by key of the backend's section.

    Args:
        section: the section; without `model_name` if it is taken from another one.
        hf_cfg: returns its `hf_cfg`, which is read after the path, because it may be invalid.
    """
    if section.model_name is not None:
        adapter = adapter_as_model(section.model_name) if isinstance(section, PolicyConfig) else None
        if (problem := adapter or model_path_problem(section.model_name)) is not None:
            yield ("model_name",), problem
    if section.python is not None:  # the libraries of another Python environment cannot be checked here
        return
    options = hf_cfg()
    if (key := options.quantized_by) is not None and importlib.util.find_spec("bitsandbytes") is None:
        yield ("hf_cfg", key), NEEDS_BITSANDBYTES.format(key=key)
    if options.attn_implementation == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        yield ("hf_cfg", "attn_implementation"), NEEDS_FLASH_ATTN


def check_combinations(hf: HFConfig, *, dtype_name: str, head: str, ranks: int) -> None:
    """Refuse settings that cannot be combined, before anything is loaded.

    Args:
        hf: `policy.hf_cfg`.
        dtype_name: data type of the model.
        head: head type.
        ranks: number of ranks.

    Raises:
        UserError: the key and what to set instead.
    """
    if ranks > 1 and hf.device_map is not None:
        raise UserError(
            f"`device_map: {hf.device_map}` spreads one model over devices, but with {ranks} ranks each rank has one "
            "device. Remove device_map; `data_parallel: fsdp2` shards a model that is too large for one device.",
            key="device_map",
        )
    if hf.lora is not None and hf.lora.autocast and dtype_name == "float32":
        raise UserError("`lora.autocast` requires `policy.precision: bfloat16`.", key="policy.hf_cfg.lora.autocast")
    if hf.attn_implementation == "flash_attention_2" and dtype_name == "float32":
        raise UserError(
            "`attn_implementation: flash_attention_2` requires bfloat16, and `policy.precision` is float32. Set it to "
            "bfloat16, or remove attn_implementation: `sdpa` supports both.",
            key="attn_implementation",
        )
    if head == "scalar" and hf.lora is None and hf.quantized_by:
        raise UserError(
            "A model with a scalar head must be trained, and quantized weights cannot be trained: train adapters "
            "(`hf_cfg.lora: {}`), or remove load_in_8bit and load_in_4bit; `precision: bfloat16` halves the memory of float32.",
            key="precision",
        )
