"""Differences between runs: configs, versions, and the final and best value of each metric."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_train.config.dotted_keys import leaves
from rlcore_cli.report.panels import Direction, better, in_order
from rlcore_cli.report.run_folder import Curve, RunFolder

ABSENT = "—"
"""Shown for a key that a run does not have."""

_IGNORED_KEYS = ("logger.run_name", "logger.log_dir")
"""Keys that differ between any two runs without affecting them."""

_SHOWN_DIGITS = 5e-5
"""Relative difference below which two values are equal in the four digits shown."""

_ROUNDING = 1e-6
"""Absolute difference below which values count as equal: rewards, fractions and nats are of order 1, and float32 sums of them
vary this much between machines and thread counts."""


@dataclass(frozen=True, kw_only=True)
class MetricComparison:
    """The comparison of one metric that all runs have; tuples are in the order of the runs.

    Attributes:
        metric: Its name.
        direction: Whether higher or lower is better; None if neither.
        finals: Value and step of each run at `step`; if that is None, the last value up to the end of the shortest run.
        bests: Best value of each run up to then, and the first step with it; None if there is no direction.
        step: The last step at which all runs have the metric. None if there is none, or if every run has a later value; then
            no run has the better final value.
    """

    metric: str
    direction: Direction | None
    finals: tuple[tuple[float, int], ...]
    bests: tuple[tuple[float, int], ...] | None
    step: int | None

    @property
    def best_final(self) -> tuple[int, ...]:
        """Indices of the runs with the best final value: several if equal, none if there is no direction."""
        return () if self.step is None else _winners([value for value, _ in self.finals], self.direction)

    @property
    def best_overall(self) -> tuple[int, ...]:
        """Indices of the runs with the best value of any step; several or none as in `best_final`."""
        return () if self.bests is None else _winners([value for value, _ in self.bests], self.direction)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A comparison of runs.

    Attributes:
        runs: In the order given; differences are relative to the first.
        letters: A, B, ...: the labels of the runs in tables and curves.
        metrics: One entry for each metric that all runs have.
        settings: Config keys that differ, with the value of each run as text.
        versions: Libraries that differ, with the version of each run; empty if a run has no environment.json.
        without_environment: The labels of runs without environment.json.
        not_shared: Metrics that not all runs have.
    """

    runs: tuple[RunFolder, ...]
    letters: tuple[str, ...]
    metrics: tuple[MetricComparison, ...]
    settings: tuple[tuple[str, tuple[str, ...]], ...]
    versions: tuple[tuple[str, tuple[str, ...]], ...]
    without_environment: tuple[str, ...]
    not_shared: tuple[str, ...]

    def notes(self, shown: Sequence[MetricComparison]) -> tuple[str, ...]:
        """How those of the metrics that are shown are compared if their steps differ between the runs."""
        lengths_differ = len({run.last_step or 0 for run in self.runs}) > 1
        steps_differ = any(row.step is None for row in shown)
        return (LENGTHS_DIFFER,) * lengths_differ + (STEPS_DIFFER,) * steps_differ


LENGTHS_DIFFER = "The runs differ in length. Each metric is compared up to the last step that all runs have."
STEPS_DIFFER = "Final values of different steps are shown with their step, and are not ranked."


def compare_runs(runs: Sequence[RunFolder]) -> Comparison:
    """Compare runs by their metrics, configs and package versions."""
    every_name = list(dict.fromkeys(name for run in runs for name in run.names()))
    curves = {name: [run.curve(name) for run in runs] for name in every_name}
    shared = in_order([name for name in every_name if all(curve.steps for curve in curves[name])])
    letters = tuple(letter(index) for index in range(len(runs)))
    without_environment = tuple(name for name, run in zip(letters, runs, strict=True) if not run.environment)
    return Comparison(
        runs=tuple(runs),
        letters=letters,
        metrics=tuple(_compare_metric(name, curves[name]) for name in shared),
        settings=_differences([_settings(run) for run in runs]),
        versions=_differences([_versions(run) for run in runs]) if not without_environment else (),
        without_environment=without_environment,
        not_shared=tuple(sorted(set(every_name) - set(shared))),
    )


def letter(index: int) -> str:
    """A, B, ..., Z, A1, B1, ..."""
    return chr(ord("A") + index % 26) + (str(index // 26) if index >= 26 else "")


def _compare_metric(name: str, curves: Sequence[Curve]) -> MetricComparison:
    direction = better(name)
    # The first value of a run may be later than the end of another.
    end = max(min(curve.steps[-1] for curve in curves), *(curve.steps[0] for curve in curves))
    step = max(set.intersection(*(set(curve.steps) for curve in curves)), default=None)
    if step is not None and all(any(step < at <= end for at in curve.steps) for curve in curves):
        step = None  # every run has a later value, so this one would show none of the ends
    end = end if step is None else step
    points = [[(value, at) for value, at in zip(c.values, c.steps, strict=True) if at <= end] for c in curves]
    finals = tuple(own[-1] for own in points)
    if direction is None:
        return MetricComparison(metric=name, direction=direction, finals=finals, bests=None, step=step)
    best = max if direction == "higher" else min
    bests = tuple(best(own, key=lambda point: point[0]) for own in points)
    return MetricComparison(metric=name, direction=direction, finals=finals, bests=bests, step=step)


def _winners(values: Sequence[float], direction: Direction | None) -> tuple[int, ...]:
    if direction is None:
        return ()
    best = max(values) if direction == "higher" else min(values)
    return tuple(i for i, value in enumerate(values) if _are_equal(value, best))


def _are_equal(value: float, best: float) -> bool:
    return value == best or abs(value - best) <= max(_ROUNDING, _SHOWN_DIGITS * max(abs(value), abs(best)))


def _settings(run: RunFolder) -> dict[str, str]:
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        for key, value in leaves(run.config or {})
        if key not in _IGNORED_KEYS
    }


def _versions(run: RunFolder) -> dict[str, str]:
    environment: dict[str, Any] = dict(run.environment or {})
    plugins = {f"plugin {name}": label for name, label in environment.get("plugins", {}).items()}
    own = {key: str(environment[key]) for key in ("python", "platform", "cpus") if key in environment}
    distributions: dict[str, str] = environment.get("distributions", {})
    return own | plugins | distributions


def _differences(sides: Sequence[dict[str, str]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    keys = dict.fromkeys(key for side in sides for key in side)
    rows = [(key, tuple(side.get(key, ABSENT) for side in sides)) for key in keys]
    return tuple((key, values) for key, values in rows if len(set(values)) > 1)
