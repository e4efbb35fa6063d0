"""Checks of `env.<task>.agent`. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.plugins.component import Kind, is_path
from rl_core.plugins.registry import Registry
from rl_core.plugins.static_lookup import missing_target
from rl_train.config.component_checks import Finding
from rl_train.config.schema import RunConfig


def agent_conflicts(run: RunConfig, registry: Registry) -> Iterator[Finding]:
    """Report agents that cannot be imported, and agents without a plugin that provides the endpoint."""
    for task, section in run.env.items():
        path = section.agent
        if path is None:
            continue
        key = ("env", task, "agent")
        if not is_path(path):
            yield key, f"{path!r} is not the dotted path of a function: write it in full, such as my_agent.{path}."
        elif (problem := missing_target(path)) is not None:
            yield key, f"cannot import {path!r}: {problem}"
        elif not registry.names(Kind.MODEL_SERVER):
            yield (
                key,
                "agents need a local endpoint, which rl-serve provides: install it (docs/installation.md).",
            )
