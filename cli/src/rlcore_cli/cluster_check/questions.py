"""What `rlcore doctor --cluster` takes from a config: paths that nodes read, folders that a run writes, and its workers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.config.paths import PathRule
from rl_core.config.source_tree import dotted

if TYPE_CHECKING:
    from rl_core.config.cluster_section import ResourcesConfig
    from rl_train.config.loader import LoadedConfig
    from rl_train.config.schema import RunConfig

_RUNS = "runs"


@dataclass(frozen=True, kw_only=True)
class Questions:
    """What to check on every node.

    Attributes:
        inputs: Existing files and folders that the config names, by key.
        outputs: Folders that a run writes to, by key.
        workers: Workers of the run, by section; the first are those of the policy.
    """

    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=lambda: {"logger.log_dir": os.path.abspath(_RUNS)})
    workers: Mapping[str, ResourcesConfig] = field(default_factory=dict)


def questions_of(config: Path | None, overrides: list[str]) -> Questions:
    """What to check for a config with overrides; without a config, the default run folder only."""
    if config is None:
        return Questions()
    from rl_train.config.loader import load_config

    loaded = load_config([config], overrides)
    run = loaded.run
    outputs = {"logger.log_dir": run.logger.log_dir}
    if run.checkpointing.enabled and run.checkpointing.checkpoint_dir is not None:
        outputs["checkpointing.checkpoint_dir"] = run.checkpointing.checkpoint_dir
    return Questions(
        inputs=_inputs(loaded),
        outputs={key: os.path.abspath(os.path.expanduser(path)) for key, path in outputs.items()},
        workers=_workers(run),
    )


def _inputs(loaded: LoadedConfig) -> dict[str, str]:
    paths = {}
    for field_ in loaded.layout.fields():
        if any(isinstance(item, PathRule) for item in field_.info.metadata):
            value = _value(loaded.resolved, field_.path)
            if isinstance(value, str) and os.path.isabs(value) and os.path.exists(value):
                paths[dotted(field_.path)] = value
    return paths


def _value(values: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _workers(run: RunConfig) -> dict[str, ResourcesConfig]:
    sections: dict[str, ResourcesConfig] = {"cluster": run.cluster}
    if run.policy.generation is not None and run.policy.generation.resources is not None:
        sections["policy.generation.resources"] = run.policy.generation.resources
    return sections
