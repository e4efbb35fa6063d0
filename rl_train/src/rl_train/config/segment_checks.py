"""Checks that algorithm and loss support rollouts with several segments. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.config.source_tree import KeyPath
from rl_train.config.component_checks import Finding
from rl_train.config.schema import RunConfig


def segment_conflicts(run: RunConfig) -> Iterator[Finding]:
    """Report settings that can divide rollouts into several segments, if the run does not support this."""
    rollouts = run.algorithm.runtime_needs.rollouts
    source = _source_of_segments(run)
    if source is None or rollouts is None:
        return
    key, setting = source
    if key == _HISTORY and max(run.max_turns.values(), default=1) == 1:
        yield key, "rollouts have one turn, so no history is rendered again and the key has no effect: remove it."
    if not rollouts.accepts_segments:
        yield (
            key,
            f"{setting} can divide a rollout into several segments, which {run.algorithm_name} does not support: it computes "
            "advantages from the sequence of a rollout's tokens. Use grpo, or remove the key.",
        )
    sequence_level = run.loss_fn.sequence_level_key
    if sequence_level is not None:
        yield (
            ("loss_fn", sequence_level),
            f"{setting} can divide a rollout into several segments, and this loss would count each of them as a rollout. Use a "
            "mean over tokens, as in clipped_pg, dapo and cispo with their defaults.",
        )


_HISTORY: KeyPath = ("rollout", "history")


def _source_of_segments(run: RunConfig) -> tuple[KeyPath, str] | None:
    if run.rollout.history == "template":
        return _HISTORY, "rollout.history: template"
    task = next((task for task, section in run.env.items() if section.agent is not None), None)
    return None if task is None else (("env", task, "agent"), "an agent")
