"""Checks that algorithm and loss support rollouts with several segments. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.config.schema import RunConfig
from rl_core.config.source_tree import KeyPath
from rl_train.algorithms.losses.config import ClippedPGLossConfig
from rl_train.algorithms.losses.distillation_config import DistillationLossConfig
from rl_train.config.component_checks import Finding


def segment_conflicts(run: RunConfig) -> Iterator[Finding]:
    """Settings with which rollouts can have several segments, although the run does not support it."""
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
    yield from _loss_conflicts(run, setting)


_HISTORY: KeyPath = ("rollout", "history")


def _source_of_segments(run: RunConfig) -> tuple[KeyPath, str] | None:
    return (_HISTORY, "rollout.history: template") if run.rollout.history == "template" else None


def _loss_conflicts(run: RunConfig, setting: str) -> Iterator[Finding]:
    loss = run.loss_fn
    if isinstance(loss, ClippedPGLossConfig | DistillationLossConfig) and not loss.token_level_loss:
        yield (
            ("loss_fn", "token_level_loss"),
            f"{setting} can divide a rollout into several segments, and a mean over sequences would count each segment as a "
            "rollout. Set token_level_loss to true, with a loss that supports it, such as clipped_pg, dapo or cispo.",
        )
    if isinstance(loss, ClippedPGLossConfig) and loss.truncated_importance_sampling_type == "seq-mask-tis":
        yield (
            ("loss_fn", "truncated_importance_sampling_type"),
            f"{setting} can divide a rollout into several segments, and seq-mask-tis would drop single segments of it. Use tis "
            "or icepop.",
        )
