"""`rlcore plan`: predicts the memory of a run, without loading weights, and computes or measures the time of a step."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl_train.files import available_memory, format_size, parse_size
from rlcore_cli.arguments import AsJson, Bases, Config, Overrides, config_files
from rlcore_cli.listing import aligned

if TYPE_CHECKING:
    from rl_core.plugins.registry import Registry
    from rl_train.config.loader import LoadedConfig
    from rl_train.config.schema import RunConfig
    from rl_train.plan.planner import MemoryPlan, ProcessPlan
    from rl_train.plan.suggestions import Suggestion
    from rl_train.plan.time_plan import MeasuredStep, TimePlan

_SHOWN = 2**20
"""Parts below this number of bytes are not printed."""


def plan(
    config: Config = None,
    overrides: Overrides = None,
    bases: Bases = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|SIZE",
            help="Plan for GPUs such as h100, or of a size such as 80GiB (memory only).",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Plan for CPUs and this much memory; by default, what this machine has available."),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Run two steps on this machine, and show the time of the second by phase."),
    ] = False,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Mean length of prompts, for the time of a step on GPUs.", show_default=False),
    ] = None,
    completion_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Mean length of completions, for the time of a step on GPUs.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict the memory of a run by process, phase and part, without loading weights.

    For GPUs with a name, the time of a step is computed from the speed of the GPU and published formulas. --measure runs two
    steps with the models and the data of the config, if it fits, and deletes the files of that run.

    If the run does not fit, overrides to copy are printed, each tried by planning again. What the plan cannot know is listed.
    Exit code: 1 if the run does not fit.

    Example:
        rlcore plan config.yaml
        rlcore plan config.yaml --measure
        rlcore plan config.yaml --memory 24GiB
        rlcore plan config.yaml --gpu h100
        rlcore plan config.yaml --gpu h100 --prompt-tokens 100 --completion-tokens 300
        rlcore plan config.yaml --gpu 80GiB policy.activation_checkpointing=true
        rlcore plan config.yaml --json
    """
    from rl_core.plugins.manager import discover
    from rl_core.plugins.registry import Registry
    from rl_train.config.loader import load_config
    from rl_train.config.rules.rule import Stage
    from rl_train.plan.planner import plan_memory
    from rl_train.plan.suggestions import suggest
    from rl_train.plan.time_plan import Gpu, parse_gpu, plan_time

    if gpu is not None and memory is not None:
        raise typer.BadParameter("give --gpu or --memory, not both.", param_hint="--gpu")
    if measure and (gpu is not None or memory is not None):
        raise typer.BadParameter("runs the config on this machine: leave out --gpu and --memory.", param_hint="--measure")
    for option, value in {"--prompt-tokens": prompt_tokens, "--completion-tokens": completion_tokens}.items():
        if value is not None and gpu is None:
            raise typer.BadParameter("is used with --gpu only, whose times are computed.", param_hint=option)
    hardware = parse_gpu(gpu, "--gpu") if gpu else parse_size(memory, "--memory") if memory else available_memory()
    known = hardware if isinstance(hardware, Gpu) else None
    limit = hardware.memory if isinstance(hardware, Gpu) else hardware
    registry = Registry(discover())
    files, changes = config_files(config, bases, overrides)
    stages = (Stage.STATIC, Stage.MACHINE) if measure else (Stage.STATIC,)

    def load(more: Sequence[str]) -> LoadedConfig:
        return load_config(files, [*changes, *more], registry=registry, stages=stages)

    plan_of = partial(plan_memory, registry=registry, on_gpu=gpu is not None, limit=limit)
    print("tracing a forward and a backward pass without weights; this takes seconds to a minute", file=sys.stderr)
    loaded = load([])
    first = plan_of(loaded.run)
    suggestion, step = None, None
    if first.fits is False:
        print("the run does not fit; looking for overrides", file=sys.stderr)
        suggestion = suggest(loaded.run, registry, first, lambda more: plan_of(load(more).run))
    if known is not None:
        step = plan_time(loaded.run, registry, gpu=known, prompt=prompt_tokens, completion=completion_tokens)
    measured = _measured(loaded, registry) if measure and first.fits is not False else None
    if as_json:
        print(json.dumps(_values(first, suggestion, step, measured), indent=2))
    else:
        lines = _described_time(step) if gpu is not None else _described_measurement(measured, loaded.run, wanted=measure)
        print("\n".join(_described(first, suggestion, lines)))
    if first.fits is False:
        raise typer.Exit(1)


def _measured(loaded: LoadedConfig, registry: Registry) -> MeasuredStep:
    from rl_train.launch.session import StopSignals
    from rl_train.plan.time_plan import measure_step

    print("starting the run for two steps, of which the second is measured", file=sys.stderr)
    with StopSignals().listen():
        return measure_step(loaded, registry)


def _values(
    planned: MemoryPlan, suggestion: Suggestion | None, step: TimePlan | None, measured: MeasuredStep | None
) -> dict[str, Any]:
    return {
        "computed_not_run": planned.on_gpu,
        "limit": planned.limit,
        "peak": planned.peak,
        "peak_phase": planned.peak_phase,
        "fits": planned.fits,
        "processes": [
            {"name": each.name, "count": each.count, "peak": each.peak, "peak_phase": each.peak_phase, "phases": each.phases}
            for each in planned.processes
        ],
        "not_counted": [*planned.undescribed, *planned.not_counted],
        "step": _step_values(step, measured),
        "suggestion": None
        if suggestion is None
        else {"overrides": suggestion.overrides, "peak": suggestion.plan.peak, "fits": suggestion.plan.fits},
    }


def _step_values(step: TimePlan | None, measured: MeasuredStep | None) -> dict[str, Any] | None:
    if measured is not None:
        return {
            "seconds": measured.seconds,
            "phases": measured.phases,
            "completion_tokens": measured.completion,
            "gpu": None,
        }
    if step is None:
        return None
    return {
        "seconds": step.seconds,
        "phases": step.phases,
        "prompt_tokens": step.prompt,
        "completion_tokens": step.completion,
        "not_predicted": step.not_predicted,
        "gpu": step.gpu,
        "assumed": step.assumed,
    }


def _described(planned: MemoryPlan, suggestion: Suggestion | None, time: list[str]) -> list[str]:
    lines = ["Computed, not run on a GPU.", ""] if planned.on_gpu else []
    for process in planned.processes:
        lines += [*_described_process(process), ""]
    where = "of each GPU" if planned.on_gpu else "of all processes"
    limit = planned.limit or 0
    lines.append(f"peak {where}: {format_size(planned.peak)} in phase {planned.peak_phase}; available: {format_size(limit)}")
    if planned.fits:
        lines.append("The run fits.")
    elif planned.fits is None:
        lines.append("The components that describe their memory fit. Whether the whole run fits is unknown.")
    if suggestion is not None:
        lines += ["", *_described_suggestion(planned, suggestion)]
    lines += ["", *time]
    return [*lines, "", "not counted or assumed:", *(f"  - {text}" for text in (*planned.undescribed, *planned.not_counted))]


def _described_process(process: ProcessPlan) -> list[str]:
    times = f" x {process.count}" if process.count > 1 else ""
    lines = [f"{process.name}{times}: peak {format_size(process.peak)} in phase {process.peak_phase}"]
    names = list(dict.fromkeys(part for parts in process.phases.values() for part in parts))
    shown = [name for name in names if max(parts.get(name, 0) for parts in process.phases.values()) >= _SHOWN]
    rows = [["", *process.phases]]
    for name in shown:
        rows.append([name, *(format_size(parts[name]) if parts.get(name) else "-" for parts in process.phases.values())])
    rows.append(["total", *(format_size(process.bytes_in(phase)) for phase in process.phases)])
    return [*lines, *(f"  {line}" for line in aligned(rows, right=True))]


def _described_suggestion(planned: MemoryPlan, suggestion: Suggestion) -> list[str]:
    process = planned.largest_process
    lines = [f"The run does not fit. The largest part is {process.largest_part} ({process.name})."]
    if not suggestion.overrides:
        return [*lines, "No override that was tried reduces it: use a smaller model, or more memory or ranks."]
    outcome = "fits" if suggestion.plan.fits else "still does not fit"
    lines += [f"With these overrides, tried by planning again, it needs {format_size(suggestion.plan.peak)} and {outcome}:"]
    return [*lines, "", f"  {' '.join(suggestion.overrides)}"]


def _described_time(step: TimePlan | None) -> list[str]:
    if step is None:
        return ["time per step: not predicted for GPUs that are given by their size; name the GPU: --gpu h100"]
    phases = _phases(step.phases)
    if step.seconds is None:
        lines = [f"time per step: not predicted. {name}: {reason}" for name, reason in step.not_predicted.items()]
        return [*lines, *([f"  predicted: {phases}"] if phases else [])]
    lines = [f"time per step: about {_seconds(step.seconds)} on {step.gpu} GPUs, computed, not run on a GPU ({phases})"]
    if step.completion:
        lines.append(f"  if prompts have {step.prompt} and completions {step.completion} tokens, in one turn")
    return [*lines, *(f"  {text}" for text in step.assumed)]


def _described_measurement(step: MeasuredStep | None, run: RunConfig, *, wanted: bool) -> list[str]:
    if step is None:
        why = "because the run does not fit" if wanted else "use --measure, which runs two steps on this machine"
        return [f"time per step: not measured; {why}"]
    lines = [f"time per step: {_seconds(step.seconds)}, measured in the second step on this machine ({_phases(step.phases)})"]
    if step.completion is not None and run.policy.generation is not None:
        most = run.policy.generation.max_new_tokens
        lines.append(f"  with completions of {step.completion:.0f} tokens on average, of at most {most}")
    return lines


def _phases(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{phase} {_seconds(value)}" for phase, value in seconds.items())


def _seconds(value: float) -> str:
    return f"{value:.3g} s"
