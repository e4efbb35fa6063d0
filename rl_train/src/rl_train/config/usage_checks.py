"""Checks that a run uses all sections of its config. Does not import torch.

Only training is checked: `rlcore eval` and `rlcore check model` use sections that training does not.
"""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.config.source_tree import KeyPath
from rl_train.config.schema import RolloutConfig, RunConfig


def unused_sections(run: RunConfig) -> Iterator[tuple[KeyPath, str]]:
    """Report sections that a training run would ignore: those for rollouts, if the algorithm never samples."""
    if run.algorithm.runtime_needs.samples:
        return
    name = run.algorithm_name
    remedy = "Remove the section, or set it in the command that uses it (`rlcore eval config.yaml ++{key}=...`)."
    if run.env:
        yield (
            ("env",),
            f"{name} does not sample or score, so the section has no effect. {remedy.format(key='env.<task>')}",
        )
    if run.rollout != RolloutConfig():
        yield (
            ("rollout",),
            f"{name} does not sample, so the section has no effect. {remedy.format(key='rollout.retries')}",
        )
    if run.policy.generation is not None:
        yield (
            ("policy", "generation"),
            f"{name} does not sample, so no engine is started and the section has no effect. "
            f"{remedy.format(key='policy.generation.backend')}",
        )
