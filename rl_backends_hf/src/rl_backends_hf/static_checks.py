"""Checks of `hf_cfg` that need neither torch nor the model's weights: model folder, libraries and LoRA's layers."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rl_backends_hf.adapter_folder import adapter_as_model
from rl_backends_hf.model_options import HFConfig, HFModelConfig
from rl_core.config.diagnostics import KeyPath
from rl_core.config.schema import GenerationConfig, PolicyConfig
from rl_core.config.section import model_path_problem
from rl_core.data.model_digests import safetensors_header
from rl_core.errors import UserError
from rl_core.plugins.component import did_you_mean

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


def target_problems(
    model_name: str, targets: str | Sequence[str], excluded: str | Sequence[str] | None
) -> Iterator[tuple[str, str]]:
    """LoRA keys with layers that a local model does not have, or with an invalid regular expression.

    Only the last component of a name is compared, because Transformers may load weights under a longer name than in the file.
    Regular expressions are matched against full names, which requires loading the model: see `rlcore validate --deep`.
    """
    for key, wanted in (("target_modules", targets), ("exclude_modules", excluded)):
        if isinstance(wanted, str):
            try:
                re.compile(wanted)
            except re.error as error:
                yield key, f"{wanted!r} is not a regular expression: {error}."
            continue
        modules = _module_names(model_name) if wanted else None
        for name in wanted or ():
            if modules is not None and name.rpartition(".")[2] not in modules:
                yield (
                    key,
                    f"{name!r} matches no layer of {model_name}.{did_you_mean(name, sorted(modules))} Its layers with weights: "
                    f"{', '.join(sorted(modules))}.",
                )


def _module_names(model_name: str) -> set[str] | None:
    """Last components of the names of all modules with weights or submodules; None if the files do not contain names."""
    names = _weight_names(model_name)
    if names is None:
        return None
    components = {component for name in names for component in name.split(".")[:-1]}
    return {component for component in components if not component.isdigit()}


def _weight_names(name_or_path: str) -> set[str] | None:
    """The names of the weights in the safetensors files of a model folder; None if there are no readable ones."""
    folder = Path(name_or_path).expanduser()
    try:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        return {name for name in safetensors_header(folder / "model.safetensors") if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError):
        return None
