"""Checks of `hf_cfg` that need neither torch nor the model's weights: model folder, libraries and LoRA's layers."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Sequence

from rl_backends_hf.model_options import HFModelConfig
from rl_core.config.model_paths import model_path_problem, weight_names
from rl_core.config.source_tree import KeyPath
from rl_core.plugins.component import did_you_mean

NEEDS_BITSANDBYTES = (
    "`{key}` needs bitsandbytes, which is not installed. Install it with `pip install 'rl-backends-hf[quantized]'`, or leave "
    "`{key}` out."
)
NEEDS_FLASH_ATTN = (
    "`attn_implementation: flash_attention_2` needs the package flash-attn, which is not installed. Use `sdpa`, the default, "
    "or install flash-attn on a machine with a CUDA GPU."
)


def model_problems(model_name: str | None, options: HFModelConfig, *, same_environment: bool) -> Iterator[tuple[KeyPath, str]]:
    """Problems with a model's path and loading options, by key of the backend's section.

    Args:
        model_name: `model_name` of the section; None if it is taken from another section.
        options: the section's `hf_cfg`.
        same_environment: whether the workers use this Python environment, so that its libraries can be checked here.
    """
    if model_name is not None and (problem := model_path_problem(model_name)) is not None:
        yield ("model_name",), problem
    if not same_environment:
        return
    for key in ("load_in_4bit", "load_in_8bit"):
        if getattr(options, key) and importlib.util.find_spec("bitsandbytes") is None:
            yield ("hf_cfg", key), NEEDS_BITSANDBYTES.format(key=key)
    if options.attn_implementation == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        yield ("hf_cfg", "attn_implementation"), NEEDS_FLASH_ATTN


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
    names = weight_names(model_name)
    if names is None:
        return None
    components = {component for name in names for component in name.split(".")[:-1]}
    return {component for component in components if not component.isdigit()}
