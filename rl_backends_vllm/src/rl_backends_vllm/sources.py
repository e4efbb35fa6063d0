"""What vLLM's source files say of its arguments and models, without importing vLLM, which takes seconds."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_MODELS = "model_executor/models"
IMAGE_FAMILIES = ("idefics3", "internvl", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "smolvlm")
"""Model types whose images are supported: tested against plain Transformers."""
_WITHOUT_IMAGES = {
    "gemma3": "all tokens of a picture attend to each other, which vLLM's attention on a CPU does not support",
    "qwen3_vl": "vLLM's classes for models of Transformers leave out the features that are added after the first layers",
}


@lru_cache(maxsize=1)
def known_engine_arguments() -> frozenset[str]:
    """Field names of `vllm.EngineArgs`; empty if vLLM is not installed, which is reported elsewhere."""
    for node in ast.parse(_source("engine/arg_utils.py")).body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            return frozenset(
                field.target.id
                for field in node.body
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id[0] != "_"
            )
    return frozenset()


def why_no_images(model_type: str) -> str | None:
    """Why rows of a model type cannot have images; None if they can."""
    if model_type in IMAGE_FAMILIES:
        return None
    reason = f": {_WITHOUT_IMAGES[model_type]}" if model_type in _WITHOUT_IMAGES else ""
    return f"vLLM does not read images with models of type {model_type}{reason}. It does with {', '.join(IMAGE_FAMILIES)}"


def why_not_adapted(hf_config: Any) -> str | None:
    """Why vLLM cannot compute with adapters of a model, from the source of its model classes; None if it can.

    Args:
        hf_config: the Transformers configuration.
    """
    # With adapters, vLLM 0.32 chooses kernels for experts that run on GPUs only, whichever layers have adapters.
    if any(getattr(hf_config.get_text_config(), key, None) for key in _EXPERTS):
        return "the model is a mixture of experts, which was not tested with adapters in vLLM on GPUs and does not run on CPUs"
    for architecture in hf_config.architectures or ():
        registered = re.search(rf'"{architecture}": \(\s*"(\w+)",\s*"(\w+)"', _source(f"{_MODELS}/registry.py"))
        # Those without a file of that name are classes for any model of Transformers, which support them.
        if registered is not None and _source(f"{_MODELS}/{registered[1]}.py") and not _supports_lora(*registered.groups()):
            return f"vLLM's {registered[2]} does not support adapters"
    return None


def _supports_lora(module: str, name: str) -> bool:
    """Whether a class of a module of vLLM's models derives from `SupportsLoRA`; classes of other packages do not."""
    body = ast.parse(_source(f"{_MODELS}/{module}.py")).body
    imported = {
        alias.name: (node.module or "").rpartition(".")[2]
        for node in body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    if name in imported:
        return _supports_lora(imported[name], name)
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        return False
    bases = [ast.unparse(base) for base in classes[name].bases]
    return "SupportsLoRA" in bases or any(_supports_lora(module, base) for base in bases if base in {*classes, *imported})


def _source(file: str) -> str:
    """Source of a module of vLLM, by its path there; empty if vLLM is not installed or has no such file."""
    spec = importlib.util.find_spec("vllm")
    path = Path(spec.origin).parent / file if spec is not None and spec.origin is not None else None
    return path.read_text(encoding="utf-8") if path is not None and path.is_file() else ""
