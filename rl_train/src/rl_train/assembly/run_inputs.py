"""Collects what decides the result of a run in addition to its config, for a comparison when the run is resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import xxhash

from rl_core.config.paths import PathRule
from rl_core.config.source_tree import KeyPath, dotted
from rl_train.assembly.preparation import Preparation
from rl_train.checkpoints.config_changes import FREE_TO_CHANGE
from rl_train.checkpoints.file_digests import path_digests
from rl_train.checkpoints.inputs import ROWS, Inputs
from rl_train.checkpoints.user_sources import source_digests
from rl_train.config.config_layout import ConfigLayout
from rl_train.config.dotted_keys import leaves_by_path
from rl_train.config.loader import LoadedConfig

_NOT_COMPARED: Final = ("python", "refit_folder")
"""Names of keys with a path that does not decide the result."""


def inputs_of(loaded: LoadedConfig, prepared: Preparation, *, only: tuple[str, ...] = ("",)) -> Inputs:
    """The user code, models, templates, data and tools of a config, except for keys that a resume may change anyway.

    Args:
        loaded: the config.
        prepared: its data and tools.
        only: prefixes of the keys to include; all by default.
    """
    found = {key: {ROWS: digest} for key, digest in _rows(prepared) if key.startswith(only)}
    for task, tools in prepared.tools.offered.items():
        specs = {f"tool {tool['function']['name']}": json.dumps(tool, sort_keys=True, default=str) for tool in tools}
        found[f"env.{task}"] = {name: xxhash.xxh3_64(spec.encode()).hexdigest() for name, spec in specs.items()}
    for path, value in leaves_by_path(loaded.resolved):
        key = dotted(path)
        if key in found or key.startswith(FREE_TO_CHANGE) or not key.startswith(only):
            continue
        if digests := _digests(loaded.layout, path, value):
            found[key] = digests
    return found


def _digests(layout: ConfigLayout, path: KeyPath, value: Any) -> dict[str, str]:
    """The digests of what the value of a key refers to: a path, or the dotted paths of code in it."""
    field = layout.find(path)
    if field is None or not any(isinstance(item, PathRule) for item in field.info.metadata):
        return {name: digest for text in _texts(value) for name, digest in source_digests(text).items()}
    return path_digests(value) if isinstance(value, str) and path[-1] not in _NOT_COMPARED else {}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(item)


def _rows(prepared: Preparation) -> Iterator[tuple[str, str]]:
    """The fingerprints of the training data, by the key of its path."""
    train = prepared.data.train
    if train is not None:
        sources = {"train": train} if train.members is None else {f"mix.{name}": one for name, one in train.members.items()}
        for key, source in sources.items():
            if (fingerprint := getattr(source.records, "fingerprint", None)) is not None:
                yield f"data.{key}.path", fingerprint
