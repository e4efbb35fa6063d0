"""`rlcore report`: renders the report of a run as one HTML page, from its curves, timelines, rollouts, config and status."""

from __future__ import annotations

import json
import os
import socket
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from markupsafe import Markup

from rl_core.errors import UserError
from rl_train.config.values import leaves
from rl_train.files import format_size, write_atomically
from rl_train.run_folders.run_names import completed_runs, existing_run_path
from rlcore_cli.report.chart import Band, Line, format_duration, format_number, line_chart, stacked_chart, time_chart
from rlcore_cli.report.panels import STEP_TIME, SelectedPanel, choose_panels, phase_label, phases
from rlcore_cli.report.rollouts import Sample, listed_rollouts, sample_rollouts
from rlcore_cli.report.run_folder import Curve, RunFolder, read_run_folder

if TYPE_CHECKING:
    from jinja2 import Environment

MAX_MIB = 5.0
"""Default maximum size of a report, in MiB."""


def report(
    run_folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="A run folder, or its name in runs.", show_default=False, autocompletion=completed_runs
        ),
    ],
    output: Annotated[Path | None, typer.Option(help="Output file; report.html in the run folder by default.")] = None,
    max_mib: Annotated[
        float, typer.Option(min=0.5, help="Maximum size of the report in MiB; rollouts are omitted to stay below it.")
    ] = MAX_MIB,
) -> None:
    """Write an HTML report of a run: curves, rollouts by token, config, versions, outcome.

    The report is a single file that needs no network. The run may still be in progress; `rlcore watch` shows a page that is
    updated.

    Example:
        rlcore report grpo_addition
        rlcore report runs/grpo_addition --output /tmp/run.html
    """
    run_folder = existing_run_path(run_folder)
    page = output if output is not None else run_folder / "report.html"
    run = read_run_folder(run_folder)
    ending = ending_of(run)
    write_page(page, render(run, ending, max_mib=max_mib))
    print(f"{page} ({format_size(page.stat().st_size)}). {ending.sentence}", flush=True)


def write_page(path: Path, text: str) -> None:
    """Replaces the file atomically, so that a reader never sees an incomplete page.

    Raises:
        UserError: The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}. Choose another file with --output.") from error


def render(run: RunFolder, ending: Ending, *, max_mib: float = MAX_MIB) -> str:
    """The report as HTML of at most `max_mib` MiB; rollouts are omitted to stay below it.

    Args:
        run: The run.
        ending: Its status.
        max_mib: Maximum size, in MiB.
    """
    parts = _parts(run, ending) | {"max_mib": max_mib}
    limit = int(max_mib * 2**20)
    # An upper bound for the size of the sentences about the sample: all of them, with very long counts.
    widest = Sample(shown_rows=10**9, shown_steps=10**9, all_steps=10**9, shortened=10**9, without_text=10**9)
    rest = len(render_template("report.html.jinja", sample=widest, **parts).encode())
    sample = sample_rollouts(run, budget_bytes=max(2, limit - rest))
    return render_template("report.html.jinja", sample=sample, **parts)


def render_live(run: RunFolder, ending: Ending, live: Live) -> str:
    """The page of `rlcore watch`: the report with a log, which loads rollouts and changes from its server."""
    return render_template("report.html.jinja", sample=listed_rollouts(run), **_parts(run, ending) | {"live": live})


@dataclass(frozen=True, kw_only=True)
class Live:
    """What the page of `rlcore watch` shows in addition.

    Attributes:
        run: Identifies the run; the page reloads itself if it changes.
        version: Identifies the contents; the page loads its charts again if it changes.
        every_s: Interval at which the page asks for changes, in seconds.
    """

    run: str
    version: str
    every_s: float


def _parts(run: RunFolder, ending: Ending) -> dict[str, Any]:
    main, further, unseen = choose_panels(run.names())
    figures = [_figure(run, chosen) for chosen in main]
    times = [figure for figure in (_times(run), _timeline(run)) if figure is not None]
    return {
        "run": run,
        "ending": ending,
        "error": _tail(ending.error),
        "tiles": _tiles(run, ending),
        "figures": [*figures, *times],
        "further": [_figure(run, chosen) for chosen in further],
        "prompts": _prompts(run),
        "unseen": unseen,
        "settings": _settings(run),
        "max_mib": MAX_MIB,
        "live": None,
    }


def security_policy() -> str:
    """A Content-Security-Policy under which a page runs its own style and scripts only, and loads nothing from elsewhere."""
    texts = _environment().globals
    hashed = {name: b64encode(sha256(str(texts[name]).encode()).digest()).decode() for name in _INLINE}
    scripts = " ".join(f"'sha256-{digest}'" for name, digest in hashed.items() if name != "style")
    return (
        f"default-src 'none'; style-src 'sha256-{hashed['style']}'; script-src {scripts}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def render_template(name: str, **parts: Any) -> str:
    """Renders a template of this package with inlined style and scripts; all other values are escaped."""
    return _environment().get_template(name).render(**parts)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("rlcore_cli.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = lambda value: format_number(value) if value is not None else "—"
    texts = files("rlcore_cli.report") / "templates"
    environment.globals |= {name: Markup((texts / file).read_text(encoding="utf-8")) for name, file in _INLINE.items()}
    return environment


_INLINE = {
    "style": "style.css",
    "charts_script": "charts.js",
    "rollouts_script": "rollouts.js",
    "page_script": "page.js",
    "live_script": "live.js",
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A chart with its title, legend and note."""

    title: str
    unit: str
    note: str
    svg: Markup
    legend: Sequence[tuple[str, int, str]]
    """Label, colour, last value."""


def figure(curves: Sequence[tuple[str, Curve]], *, title: str, unit: str = "", note: str = "") -> Figure:
    """A line chart of labelled curves."""
    lines = [
        Line(label=label, steps=curve.steps, values=curve.values, colour=colour, not_finite=curve.not_finite)
        for colour, (label, curve) in enumerate(curves)
    ]
    smoothed = next((line for line in lines if line.is_smoothed), None)
    notes = [note] if note else []
    if smoothed is not None:
        notes.append(f"Bold: moving average over {smoothed.window} values.")
    if any(line.not_finite for line in lines):
        notes.append("Marks at the top: NaN or infinite values.")
    legend = [(line.label, line.colour, format_number(line.values[-1]) if line.values else "—") for line in lines]
    svg = Markup(line_chart(lines, title=title))
    return Figure(title=title, unit=unit, note=" ".join(notes), svg=svg, legend=legend)


def _figure(run: RunFolder, chosen: SelectedPanel) -> Figure:
    panel = chosen.panel
    curves = [(name, run.curve(name)) for name in chosen.names]
    return figure(curves, title=panel.title, unit=panel.unit, note=panel.note)


def _times(run: RunFolder) -> Figure | None:
    """The time of each step by phase; time outside of all phases is `other`."""
    rows = {step: row for step, row in run.metrics.items() if row.get(STEP_TIME) is not None}
    names = phases(run.names())
    if not rows or not names:
        return None
    columns = {phase_label(name): [row.get(name) or 0.0 for row in rows.values()] for name in names}
    measured = [sum(column) for column in zip(*columns.values(), strict=True)]
    columns["other"] = [max(0.0, (row[STEP_TIME] or 0.0) - known) for row, known in zip(rows.values(), measured, strict=True)]
    layers = [(label, values, colour) for colour, (label, values) in enumerate(columns.items())]
    legend = [(label, colour, format_number(sum(values) / len(values))) for label, values, colour in layers]
    svg = Markup(stacked_chart(list(rows), layers, title="Time by phase"))
    return Figure(title="Time by phase", unit="s", note="Time per step; the legend shows the mean.", svg=svg, legend=legend)


def _timeline(run: RunFolder) -> Figure | None:
    """The step with the median duration over time."""
    step = _typical_step(run.timelines)
    if step is None:
        return None
    timeline = run.timelines[step]
    spans = [  # phases of plugins have the color of `rollout`
        Band(label=name, start=start, end=end, colour=_COLOURS.get(name, _COLOURS["rollout"]))
        for name, start, end in timeline["phases"]
    ]
    waiting = _waiting(timeline)
    seconds = {band.label: 0.0 for band in spans}
    for band in spans:
        seconds[band.label] += band.end - band.start
    colours = {band.label: band.colour for band in spans}
    legend = [(label, colours[label], f"{format_number(total)} s") for label, total in seconds.items()]
    legend += [(label, colour, format_number(sum(counts) / len(counts))) for label, counts, colour in waiting]
    title = f"Step {step} over time"
    svg = Markup(time_chart(timeline["seconds"], spans, waiting, title=title))
    note = (
        "The step with the median duration. Top: phases of the trainer, which waits for rollouts in the phase rollout. "
        f"Curves: number of rollouts that wait for the engine and for the environment. {_advice(run, timeline)}"
    )
    return Figure(title=title, unit="rollouts, by second", note=note.strip(), svg=svg, legend=legend)


_SAMPLER = "data/sampler/"
_SAMPLER_STEPS = 6


def _prompts(run: RunFolder) -> dict[str, Any] | None:
    """The `steps` and `rows` of a table of what the prompt sampler recorded, at steps spread evenly over the run, if any."""
    names = [name for name in run.names() if name.startswith(_SAMPLER)]
    recorded = [step for step, row in run.metrics.items() if not row.keys().isdisjoint(names)]
    if not recorded:
        return None
    last = len(recorded) - 1
    steps = list(dict.fromkeys(recorded[round(part * last / (_SAMPLER_STEPS - 1))] for part in range(_SAMPLER_STEPS)))
    return {
        "steps": steps,
        "rows": [(name.removeprefix(_SAMPLER), [run.metrics[step].get(name) for step in steps]) for name in names],
    }


_COLOURS = {"train": 0, "refit": 1, "score": 2, "train_value": 3, "validate": 4, "rollout": 7}
"""Colors of the phases of the step loop; in `rollout`, it waits for rollouts."""
_WAITING = {"engine": 5, "environment": 6}
_BALANCED = 0.15
"""Idle fractions below it are not worth a change."""


def _typical_step(timelines: Mapping[int, Mapping[str, Any]]) -> int | None:
    """The step with the median duration, without the first, which starts with an idle engine; None without steps."""
    steps = sorted(timelines)[1:] or sorted(timelines)
    ordered = sorted(steps, key=lambda step: (timelines[step]["seconds"], step))
    return ordered[len(ordered) // 2] if ordered else None


def _waiting(timeline: Mapping[str, Any]) -> list[tuple[str, Sequence[float], int]]:
    """Label, number of rollouts over the step, and color: those that wait for the engine, and for the environment if any do."""
    waiting = timeline["waiting"]
    return [
        (f"wait for the {place}", waiting[place], colour)
        for place, colour in _WAITING.items()
        if place == "engine" or any(waiting[place])
    ]


def _advice(run: RunFolder, timeline: Mapping[str, Any]) -> str:
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


_RECENT = 20
"""Steps whose mean time predicts that of the rest."""


def _tiles(run: RunFolder, ending: Ending) -> list[tuple[str, str, str]]:
    """The headline numbers: label, value, remark."""
    tiles = []
    for name in ("reward/mean", "validation/accuracy", "validation/loss"):
        curve = run.curve(name)
        if curve.steps:
            first, last = format_number(curve.values[0]), format_number(curve.values[-1])
            tiles.append((name.removesuffix("/mean").replace("/", " "), last, f"{first} at step {curve.steps[0]}"))
    seconds = run.curve(STEP_TIME).values
    if seconds:
        tiles.append(
            ("total step time", format_duration(sum(seconds)), f"{format_number(sum(seconds) / len(seconds))} s per step")
        )
        left = (run.planned_steps or 0) - (run.last_step or 0)
        if left > 0 and not ending.is_over:
            recent = seconds[-_RECENT:]
            tiles.append(("time left", format_duration(left * sum(recent) / len(recent)), f"{left} steps, at the recent speed"))
    speed = run.curve("tokens_per_s").values
    if speed:
        tiles.append(("tokens per second", format_number(sorted(speed)[len(speed) // 2]), "median over steps"))
    return tiles


LONGEST_VALUE = 2000


def _settings(run: RunFolder) -> list[tuple[str, str, str, str]]:
    """All config values: key, value, kind of origin, origin."""
    sources = (run.provenance or {}).get("values", {})
    rows = []
    for key, value in leaves(run.config or {}):
        source = sources.get(key, {})
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        if len(text) > LONGEST_VALUE:
            text = f"{text[:LONGEST_VALUE]} [... {len(text) - LONGEST_VALUE} characters omitted]"
        rows.append((key, text, source.get("kind", ""), source.get("source", "")))
    return rows


LONGEST_ERROR = 20_000


def _tail(text: str | None) -> str | None:
    """The end of a long error message, which has the cause."""
    if text is None or len(text) <= LONGEST_ERROR:
        return text
    return f"[... {len(text) - LONGEST_ERROR} characters omitted]\n{text[-LONGEST_ERROR:]}"


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The status of a run.

    Attributes:
        state: `building`, `running`, `finished`, `interrupted`, `failed`, `vanished` (its process is gone) or
            `unknown`.
        sentence: The status in words.
        error: The error message of the run.
        times: Start, end and duration, as far as they are recorded.
        is_over: Whether the run has ended.
    """

    state: str
    sentence: str
    error: str | None = None
    times: str = ""
    is_over: bool = True


def ending_of(run: RunFolder) -> Ending:
    """The status of a run from status.json; its process is checked only on the machine where it ran."""
    return replace(_ending(run), times=_span(run))


def _ending(run: RunFolder) -> Ending:
    status = run.status or {}
    state = status.get("state")
    done, planned = run.last_step or 0, run.planned_steps
    so_far = f"{done} of {planned} steps" if planned is not None else f"{done} steps"
    during = _during(status.get("during"))
    error = str(status["error"]) if status.get("error") else None
    match state:
        case "finished":
            stopped = f", {status['stopped']}" if status.get("stopped") else ""
            return Ending(state=state, sentence=f"Finished: {so_far}{stopped}.")
        case "interrupted":
            return Ending(state=state, sentence=f"Interrupted{during} after {so_far}.", error=error)
        case "failed":
            return Ending(state=state, sentence=f"Failed{during} after {so_far}.", error=error)
        case "building" | "running" if _is_gone(run, status.get("pid")):
            sentence = (
                f"Exited without an error message after {so_far}: process {status['pid']} is gone. It was killed (out of "
                "memory?) or the machine went down."
            )
            return Ending(state="vanished", sentence=sentence)
        case "building":
            return Ending(state=state, sentence=f"Starting: {so_far} so far.", is_over=False)
        case "running":
            return Ending(state=state, sentence=f"Running: {so_far} so far.", is_over=False)
        case _:
            return Ending(state="unknown", sentence=f"{so_far.capitalize()}; the run folder has no valid status.")


def _during(phase: object) -> str:
    if not phase:
        return ""
    return " during startup," if phase == "building" else f" in phase {phase},"


def _span(run: RunFolder) -> str:
    """Start, end and duration; for a resumed run, those of its latest process."""
    status = run.status or {}
    started = status.get("started") or (run.environment or {}).get("started")
    if not started:
        return ""
    ended, seconds = status.get("ended"), status.get("seconds")
    end = f", ended {_moment(ended)}" if ended else ""
    took = f", took {format_duration(seconds)}" if isinstance(seconds, int | float) else ""
    return f"Started {_moment(started)}{end}{took}."


def _moment(text: object) -> str:
    return str(text).replace("T", " ").replace("+00:00", " UTC")


def _is_gone(run: RunFolder, pid: object) -> bool:
    # While a run is being resumed, environment.json still describes the previous process.
    host = (run.status or {}).get("host") or (run.environment or {}).get("host")
    if not isinstance(pid, int) or host != socket.gethostname():
        return False
    if Path("/proc").is_dir():
        return not Path(f"/proc/{pid}").exists()
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
