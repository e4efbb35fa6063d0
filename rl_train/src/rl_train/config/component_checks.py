"""Runs the `conflicts` checks of all component sections."""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.config.schema import DatasetConfig, EnvironmentConfig, GenerationConfig, PolicyConfig
from rl_core.config.source_tree import KeyPath
from rl_train.config.schema import LoggerConfig, LossConfig, RunConfig
from rl_train.config.section_resolver import COMPANIONS

Finding = tuple[KeyPath, str]
"""A key, and what is wrong with it."""

_Checked = PolicyConfig | GenerationConfig | DatasetConfig | EnvironmentConfig | LossConfig | LoggerConfig


def component_conflicts(run: RunConfig) -> Iterator[Finding]:
    """Conflicts reported by the sections of backends, datasets, environments, losses and loggers."""
    for path, section in sections_of(run):
        for inner, message in section.conflicts(run):
            yield (*path, *inner), message


def models_of(run: RunConfig) -> dict[str, PolicyConfig]:
    """The policy and its companion models, by section name."""
    found = {name: getattr(run, name) for name in ("policy", *COMPANIONS)}
    return {name: model for name, model in found.items() if model is not None}


def sections_of(run: RunConfig) -> Iterator[tuple[KeyPath, _Checked]]:
    """The sections of components, each with its key."""
    yield ("loss_fn",), run.loss_fn
    for name, model in models_of(run).items():
        yield (name,), model
    if run.policy.generation is not None:
        yield ("policy", "generation"), run.policy.generation
    for key, dataset in run.data.sections().items():
        yield ("data", *key.split(".", 1)), dataset
    for task, environment in run.env.items():
        yield ("env", task), environment
    for name, logger in run.logger.loggers.items():
        if logger.enabled:
            yield ("logger", "loggers", name), logger
