"""`rlcore compare`: how runs differ in configs, versions, and the final and best value of each metric.

The comparison is printed with overlaid curves and tables, as JSON, or rendered as an HTML page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from rl_core.errors import UserError
from rl_train.config.values import leaves
from rl_train.files import format_size
from rl_train.run_folders.run_names import completed_runs, existing_run_path
from rlcore_cli.arguments import AsJson
from rlcore_cli.curve import draw
from rlcore_cli.listing import aligned
from rlcore_cli.report.chart import format_number
from rlcore_cli.report.page import Figure, figure, render_template, write_page
from rlcore_cli.report.panels import Direction, SelectedPanel, better, choose_panels, in_order
from rlcore_cli.report.run_folder import Curve, RunFolder, read_run_folder


def compare(
    run_folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Two or more run folders, or their names in runs.",
            show_default=False,
            autocompletion=completed_runs,
        ),
    ],
    output: Annotated[Path | None, typer.Option(help="Also write an HTML page to this file.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show all metrics that the runs have in common.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare runs: overlaid curves, differences between configs, final and best value of each metric.

    Example:
        rlcore compare grpo_addition grpo_addition-2
        rlcore compare runs/a runs/b runs/c --output compare.html
    """
    if len(run_folders) < 2:
        raise UserError(
            f"Only one run given ({run_folders[0]}): `rlcore compare` needs at least two. `rlcore report` shows one run."
        )
    comparison = compare_runs([read_run_folder(existing_run_path(folder)) for folder in run_folders])
    if output is not None:
        write_page(output, render_comparison(comparison))
    if as_json:
        print(json.dumps(_plain(comparison), indent=2))
        return
    print("\n".join(lines(comparison, everything=everything)))
    if output is not None:
        print(f"\n{output} ({format_size(output.stat().st_size)})")


def _plain(comparison: Comparison) -> dict[str, Any]:
    return {
        "runs": {name: str(run.path) for name, run in zip(comparison.letters, comparison.runs, strict=True)},
        "config": {key: list(values) for key, values in comparison.settings},
        "versions": {key: list(values) for key, values in comparison.versions},
        "metrics": {
            row.metric: {
                "better": row.direction,
                "compared_at": row.step,
                "final": [{"value": value, "step": step} for value, step in row.finals],
                "best": None if row.bests is None else [{"value": value, "step": step} for value, step in row.bests],
            }
            for row in comparison.metrics
        },
    }


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
    best = max if direction == "higher" else min
    bests = None if direction is None else tuple(best(own, key=lambda point: point[0]) for own in points)
    return MetricComparison(metric=name, direction=direction, finals=finals, bests=bests, step=step)


def _winners(values: Sequence[float], direction: Direction | None) -> tuple[int, ...]:
    if direction is None:
        return ()
    best = max(values) if direction == "higher" else min(values)
    return tuple(i for i, value in enumerate(values) if _are_equal(value, best))


_SHOWN_DIGITS = 5e-5
"""Relative difference below which two values are equal in the four digits shown."""
_ROUNDING = 1e-6
"""Absolute difference below which values count as equal: rewards, fractions and nats are of order 1, and float32 sums of them
vary this much between machines and thread counts."""


def _are_equal(value: float, best: float) -> bool:
    return value == best or abs(value - best) <= max(_ROUNDING, _SHOWN_DIGITS * max(abs(value), abs(best)))


_IGNORED_KEYS = ("logger.run_name", "logger.log_dir")
"""Keys that differ between any two runs without affecting them."""


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


ABSENT = "—"
"""Shown for a key that a run does not have."""


def _differences(sides: Sequence[dict[str, str]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    keys = dict.fromkeys(key for side in sides for key in side)
    rows = [(key, tuple(side.get(key, ABSENT) for side in sides)) for key in keys]
    return tuple((key, values) for key, values in rows if len(set(values)) > 1)


DRAWN = ("reward/mean", "validation/accuracy", "validation/loss", "loss")
"""Metrics to plot: the first two of these that all runs have."""
MOST_DRAWN = 2
LONGEST_VALUE = 40
MOST_NAMED = 12


def lines(comparison: Comparison, *, everything: bool) -> Iterator[str]:
    """The lines of the comparison.

    Args:
        comparison: The runs.
        everything: Include all shared metrics, not only those that a report shows first.
    """
    for name, run in zip(comparison.letters, comparison.runs, strict=True):
        yield f"{name} = {run.path} ({run.last_step or 0} steps)"
    shared = [row.metric for row in comparison.metrics]
    for metric in [name for name in DRAWN if name in shared][:MOST_DRAWN]:
        yield ""
        runs = zip(comparison.letters, comparison.runs, strict=True)
        yield draw([(name[0], run.curve(metric)) for name, run in runs], metric)
    yield ""
    yield from _differing("config", comparison, comparison.settings)
    if comparison.without_environment:
        yield f"Versions not compared: no environment.json in {', '.join(comparison.without_environment)}."
        yield ""
    else:
        yield from _differing("version", comparison, comparison.versions)
    chosen, _, _ = choose_panels([row.metric for row in comparison.metrics])
    first_shown = {name for panel in chosen for name in panel.names}
    metrics = [row for row in comparison.metrics if everything or row.metric in first_shown]
    for note in comparison.notes(metrics):
        yield note
        yield ""
    yield from _metric_table(metrics, comparison.letters)
    if comparison.not_shared:
        named, more = comparison.not_shared[:MOST_NAMED], len(comparison.not_shared) - MOST_NAMED
        yield f"Not in all runs: {', '.join(named)}" + (f", and {more} more." if more > 0 else ".")


def _differing(title: str, comparison: Comparison, rows: tuple[tuple[str, tuple[str, ...]], ...]) -> Iterator[str]:
    if not rows:
        yield f"No differences between the {title}s."
        yield ""
        return
    table = [[title, *comparison.letters]]
    table += [[key, *(_short(value) for value in values)] for key, values in rows]
    yield from aligned(table)
    yield ""


def _metric_table(metrics: Sequence[MetricComparison], letters: tuple[str, ...]) -> Iterator[str]:
    if not metrics:
        yield "The runs have no metric in common."
        return
    table = [["metric", *(f"{name} final" for name in letters), *(f"{name} best" for name in letters), "better run"]]
    for row in metrics:
        finals = [f"{value} at {step}" if row.step is None else value for value, step in _cells(row.finals)]
        bests = [value for value, _ in _cells(row.bests or ())]
        table.append([row.metric, *finals, *(bests or [""] * len(letters)), better_runs(row, letters)])
    yield from aligned(table)
    yield "In parentheses: difference from A. With one run each, a difference may be due to the seed."


def _cells(points: tuple[tuple[float, int], ...]) -> list[tuple[str, int]]:
    return [(cell(value, points[0][0] if index else None), step) for index, (value, step) in enumerate(points)]


def _short(value: str) -> str:
    return value if len(value) <= LONGEST_VALUE else f"{value[: LONGEST_VALUE - 1]}…"


def cell(value: float, first: float | None) -> str:
    """A value and its difference from the first run."""
    if first is None:
        return format_number(value)
    if value == first:
        return f"{format_number(value)} (=)"
    sign = "+" if value > first else ""
    return f"{format_number(value)} ({sign}{format_number(value - first)})"


def better_runs(row: MetricComparison, letters: tuple[str, ...]) -> str:
    """The labels of the better runs, or '' if the metric has no direction."""

    def name(winners: tuple[int, ...]) -> str:
        return "equal" if len(winners) == len(letters) else " and ".join(letters[index] for index in winners)

    end, best = name(row.best_final), name(row.best_overall)
    if row.step is None:
        return f"best: {best}" if best else ""
    return end if end == best else f"final: {end}, best: {best}"


def render_comparison(comparison: Comparison) -> str:
    """The HTML page."""
    names = list(dict.fromkeys(name for run in comparison.runs for name in run.names()))
    main, further, unseen = choose_panels(names)
    return render_template(
        "compare.html.jinja",
        comparison=comparison,
        runs=list(zip(comparison.letters, comparison.runs, strict=True)),
        figures=[drawn for chosen in main for drawn in _figures(comparison, chosen)],
        further=[drawn for chosen in further for drawn in _figures(comparison, chosen)],
        unseen=unseen,
        metrics=[_row(found, comparison) for found in comparison.metrics],
    )


def _figures(comparison: Comparison, chosen: SelectedPanel) -> list[Figure]:
    """One chart per metric, one line per run."""
    panel = chosen.panel
    return [
        figure(
            [(letter, run.curve(name)) for letter, run in zip(comparison.letters, comparison.runs, strict=True)],
            title=name,
            unit=panel.unit,
            note=panel.note if len(chosen.names) == 1 else "",
        )
        for name in chosen.names
    ]


def _row(row: MetricComparison, comparison: Comparison) -> dict[str, Any]:
    return {
        "metric": row.metric,
        "direction": row.direction,
        "steps_differ": row.step is None,
        "finals": _cells(row.finals),
        "bests": _cells(row.bests) if row.bests is not None else [("", None)] * len(comparison.runs),
        "words": better_runs(row, comparison.letters),
    }
