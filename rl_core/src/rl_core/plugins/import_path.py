"""Imports objects that a config names by a dotted path."""

from __future__ import annotations

import importlib
from typing import Any

from rl_core.errors import ConfigError, frames_of
from rl_core.plugins.component import describe, no_attribute

MODULE_FOLDERS: list[str] = []
"""Folders that are searched for modules after all others, here and in workers of a Ray cluster that is started later."""


def resolve(dotted: str, *, key: str) -> Any:
    """The object at a dotted path such as `torch.optim.AdamW` or `torch.optim:AdamW`; `key` is the config key, for errors.

    Raises:
        ConfigError: A component of the path does not exist, or its module cannot be imported.
    """
    module_name, _, attribute = dotted.replace(":", ".").rpartition(".")
    if not module_name:
        raise ConfigError(f"`{key}`: {dotted!r} is not a dotted path. Write it in full, such as torch.optim.AdamW.")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        file, line = frames_of(error)[-1]
        where = "" if "importlib" in file else f" ({file}:{line})"
        hint = "Check the spelling, or install it; the working directory and the folder of the config are searched as well."
        problem = f"{error}{where}. {hint}" if isinstance(error, ImportError) else f"it raised {describe(error)}{where}."
        raise ConfigError(f"`{key}`: cannot import {module_name!r} of {dotted!r}: {problem}") from error
    if not hasattr(module, attribute):
        raise ConfigError(f"`{key}`: {no_attribute(module_name, attribute, dir(module))}")
    return getattr(module, attribute)
