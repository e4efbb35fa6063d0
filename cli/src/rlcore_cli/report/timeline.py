"""One step of a run over time: what the trainer did, what the rollouts waited for, and which side needs more resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from rlcore_cli.report.chart import Band
from rlcore_cli.report.run_folder import RunFolder

_COLOURS = {"train": 0, "refit": 1, "score": 2, "train_value": 3, "validate": 4, "rollout": 7}
"""Colors of the phases of the step loop; in `rollout`, it waits for rollouts."""
_WAITING = {"engine": 5, "environment": 6}
_BALANCED = 0.15
"""Idle fractions below it are not worth a change."""


def typical_step(timelines: Mapping[int, Mapping[str, Any]]) -> int | None:
    """The step with the median duration, without the first, which starts with an idle engine; None without steps."""
    steps = sorted(timelines)[1:] or sorted(timelines)
    ordered = sorted(steps, key=lambda step: (timelines[step]["seconds"], step))
    return ordered[len(ordered) // 2] if ordered else None


def bands(timeline: Mapping[str, Any]) -> list[Band]:
    """The phases of the step loop; phases of plugins have the color of `rollout`."""
    return [
        Band(label=name, start=start, end=end, colour=_COLOURS.get(name, _COLOURS["rollout"]))
        for name, start, end in timeline["phases"]
    ]


def curves(timeline: Mapping[str, Any]) -> list[tuple[str, Sequence[float], int]]:
    """Label, number of rollouts over the step, and color: those that wait for the engine, and for the environment if any do."""
    waiting = timeline["waiting"]
    return [
        (f"wait for the {place}", waiting[place], colour)
        for place, colour in _WAITING.items()
        if place == "engine" or any(waiting[place])
    ]


def advice(run: RunFolder, timeline: Mapping[str, Any]) -> str:
    """Which side needs more resources, from the idle fractions of all steps but the first and the timeline of one."""
    idle = {side: run.curve(f"{side}/idle_frac").values for side in ("trainer", "engine")}
    if not all(idle.values()):
        return ""
    trainer, engine = (mean(idle[side][1:] or idle[side]) for side in ("trainer", "engine"))
    found = f"On average, the trainer waits in {trainer:.0%} of a step, and no rollout waits for the engine in {engine:.0%}."
    return f"{found} {_remedy(trainer, engine, run, timeline)}"


def _remedy(trainer: float, engine: float, run: RunFolder, timeline: Mapping[str, Any]) -> str:
    means = {place: mean(counts) if counts else 0.0 for place, counts in timeline["waiting"].items()}
    in_environment = means.get("environment", 0.0) > means.get("engine", 0.0)
    if max(trainer, engine) < _BALANCED:
        return "Both sides are busy: to train faster, give both more resources."
    if not (run.config or {}).get("rollout", {}).get("max_staleness", 0):
        return "Sampling and training alternate, so one side is always idle; rollout.max_staleness lets them overlap."
    if engine > trainer:
        return "Training is slower than sampling: the policy needs more resources."
    if in_environment:
        return "Sampling is slower than training, and most rollouts wait for the environment: it needs more workers."
    return "Sampling is slower than training: the engine needs more resources."
