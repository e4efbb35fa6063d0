"""`rlcore plan`: predicts the memory of a run and the time of a step, without loading weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl_train.files import available_memory, format_size, parse_size
from rlcore_cli.arguments import AsJson, Bases, Config, Overrides, config_files

if TYPE_CHECKING:
    from rl_train.config.schema import RunConfig
    from rl_train.plan.planner import MemoryPlan, ProcessPlan
    from rl_train.plan.suggestions import Suggestion
    from rl_train.plan.time_plan import TimePlan

_SHOWN = 2**20
"""Parts below this number of bytes are not printed."""
_SHORT_S = 1.0
"""Seconds of a step below which what is not counted takes most of them."""
_BUSY = 1.5
"""Load per CPU above which a measured time is marked."""


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
    prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Mean length of prompts, for the time of a step.", show_default=False),
    ] = None,
    completion_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Mean length of completions, for the time of a step.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict the memory of a run by process, phase and part, and the time of a step, without loading weights.

    For CPUs, the time is measured on this machine with two layers and random weights, which takes a few seconds, and with vLLM
    ten more. For GPUs, it is computed from the speed of the GPU and published formulas.

    If the run does not fit, overrides to copy are printed, each tried by planning again. What the plan cannot know is listed.
    Exit code: 1 if the run does not fit.

    Example:
        rlcore plan config.yaml
        rlcore plan config.yaml --memory 24GiB
        rlcore plan config.yaml --gpu h100
        rlcore plan config.yaml --gpu 80GiB policy.activation_checkpointing=true
        rlcore plan config.yaml --prompt-tokens 100 --completion-tokens 300
        rlcore plan config.yaml --json
    """
    from rl_core.plugins.manager import discover
    from rl_core.plugins.registry import Registry
    from rl_train.config.loader import load_config
    from rl_train.plan.planner import plan_memory
    from rl_train.plan.suggestions import suggest
    from rl_train.plan.time_plan import Gpu, parse_gpu, plan_time

    if gpu is not None and memory is not None:
        raise typer.BadParameter("give --gpu or --memory, not both.", param_hint="--gpu")
    hardware = parse_gpu(gpu, "--gpu") if gpu else parse_size(memory, "--memory") if memory else available_memory()
    known = hardware if isinstance(hardware, Gpu) else None
    limit = hardware.memory if isinstance(hardware, Gpu) else hardware
    registry = Registry(discover())
    files, changes = config_files(config, bases, overrides)

    def load(more: Sequence[str]) -> RunConfig:
        return load_config(files, [*changes, *more], registry=registry).run

    plan_of = partial(plan_memory, registry=registry, on_gpu=gpu is not None, limit=limit)
    print("tracing a forward and a backward pass without weights; this takes seconds to a minute", file=sys.stderr)
    run = load([])
    first = plan_of(run)
    if first.fits is False:
        print("the run does not fit; looking for overrides", file=sys.stderr)
    suggestion = suggest(run, registry, first, lambda more: plan_of(load(more))) if first.fits is False else None
    timed = known is not None or gpu is None
    step = plan_time(run, registry, gpu=known, prompt=prompt_tokens, completion=completion_tokens) if timed else None
    if as_json:
        print(json.dumps(_values(first, suggestion, step), indent=2))
    else:
        print("\n".join(_described(first, suggestion, step)))
    if first.fits is False:
        raise typer.Exit(1)


def _values(planned: MemoryPlan, suggestion: Suggestion | None, step: TimePlan | None) -> dict[str, Any]:
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
        "step": None
        if step is None
        else {
            "seconds": step.seconds,
            "phases": step.phases,
            "prompt_tokens": step.prompt,
            "completion_tokens": step.completion,
            "not_predicted": step.not_predicted,
            "load_per_cpu": step.load,
            "gpu": step.gpu,
            "assumed": step.assumed,
        },
        "suggestion": None
        if suggestion is None
        else {"overrides": suggestion.overrides, "peak": suggestion.plan.peak, "fits": suggestion.plan.fits},
    }


def _described(planned: MemoryPlan, suggestion: Suggestion | None, step: TimePlan | None) -> list[str]:
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
    lines += ["", *_described_time(step)]
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
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([f"  {first:<{widths[0]}}", *cells]))
    return lines


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
    phases = ", ".join(f"{phase} {_seconds(value)}" for phase, value in step.phases.items())
    if step.seconds is None:
        lines = [f"time per step: not predicted. {name}: {reason}" for name, reason in step.not_predicted.items()]
        return [*lines, *([f"  predicted: {phases}"] if phases else [])]
    hardware = "CPUs like those of this machine" if step.gpu is None else f"{step.gpu} GPUs, computed, not run on a GPU"
    lines = [f"time per step: about {_seconds(step.seconds)} on {hardware} ({phases})"]
    if step.completion:
        lines.append(f"  if prompts have {step.prompt} and completions {step.completion} tokens, in one turn")
    if step.gpu is not None:
        return [*lines, *(f"  {text}" for text in step.assumed)]
    lines.append("  without environments, validation, checkpoints and communication between ranks")
    if step.seconds < _SHORT_S:
        lines.append("  Steps this short mostly take time that is not counted, such as collecting rows and writing metrics.")
    busy = f"  This machine is busy (load {step.load:.1f} per CPU), so the time may be too long: plan again when it is idle."
    return [*lines, *([busy] if step.load > _BUSY else [])]


def _seconds(value: float) -> str:
    return f"{value:.3g} s"
