"""Checks and copies a Transformers model folder as data, without running code or loading tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from rl_core.config.paths import model_files
from rl_core.errors import CheckpointError
from rl_core.training.loaded_model import check_files

_CODE_KEY = "auto_map"
_CONFIGS = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")


def copy_model(source: Path, output: Path) -> None:
    """Copy weights, config, tokenizer and templates.

    Raises:
        CheckpointError: tensors are missing, have other shapes than the model of the config, or cannot be read.
    """
    check_model(source)
    for name in model_files(source):
        (output / name).parent.mkdir(exist_ok=True)
        shutil.copy(source / name, output / name)


def check_model(folder: Path) -> None:
    """Compare the tensors with the model of the config: see `check_files`.

    Raises:
        CheckpointError: tensors are missing, have another shape, or cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    weights = [folder / name for name in model_files(folder) if name.endswith(".safetensors")]
    if not weights:
        raise CheckpointError(
            f"{folder} has no weights in safetensors files. Other formats, such as pickles, are not converted."
        )
    for path in weights:
        try:
            with safe_open(path, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} is incomplete or corrupt: {error}. Restore it from a copy.") from error
    try:
        check_files(str(folder), error=CheckpointError, use_safetensors=True)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged config or index raises anything
        raise CheckpointError(f"{folder} is not a complete model: {type(error).__name__}: {error}") from error


def left_out(source: Path) -> tuple[str, ...]:
    """Names of files and folders in a model folder that are not copied: documentation, pickles, code."""
    copied = {Path(name).parts[0] for name in model_files(source)}
    return tuple(sorted(entry.name for entry in source.iterdir() if entry.name not in copied))


def needed_code(source: Path) -> tuple[str, ...]:
    """Python files in a model folder to which its configs refer: model or tokenizer cannot be loaded without them."""
    modules = {reference.partition(".")[0] for name in _CONFIGS for reference in _references(source / name)}
    return tuple(sorted(path.name for path in source.glob("*.py") if modules & {entry.stem for entry in source.glob("*.py")}))


def _references(config: Path) -> list[str]:
    """The classes of a config's own code, as `module.Class`; those of other repositories are left out."""
    try:
        content: Any = json.loads(config.read_text(encoding="utf-8"))
        values = content.get(_CODE_KEY, {}).values()
    except (OSError, ValueError, AttributeError):
        return []
    flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return [item for item in flat if isinstance(item, str) and "--" not in item]
