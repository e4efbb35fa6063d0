"""Measures the time of a step: runs two steps of a config on this machine, without loggers and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from rl_core.errors import ConfigError
from rl_core.plugins.registry import Registry
from rl_train.assembly.error_locations import with_location
from rl_train.assembly.run_assembly import build_run
from rl_train.config.loader import LoadedConfig
from rl_train.config.schema import CheckpointingConfig, LoggingConfig, ProfilingConfig, RunConfig

_STEPS: Final = 2
"""The first step also prepares what later steps reuse, so the second is measured."""


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """The time of the second step.

    Attributes:
        seconds: Seconds of the step.
        phases: Seconds of its phases; what is outside of them is missing.
        completion: Mean number of sampled tokens of its completions; None if it does not sample.
    """

    seconds: float
    phases: Mapping[str, float]
    completion: float | None


def measure_step(loaded: LoadedConfig, registry: Registry) -> MeasuredStep:
    """Run two steps with the config's own models and data. All processes and files of the run are gone afterwards.

    Args:
        loaded: The config.
        registry: Used to look up components.

    Raises:
        ConfigError: The run cannot start, or has only one step.
    """
    quiet = {"logger": LoggingConfig(), "checkpointing": CheckpointingConfig(enabled=False), "profiling": ProfilingConfig()}
    loaded = replace(loaded, run=loaded.run.model_copy(update=quiet))
    name, steps = loaded.run.algorithm_name, dict[int, Mapping[str, float]]()
    with TemporaryDirectory(prefix="rlcore-plan-") as folder, with_location(loaded), ExitStack() as exits:
        run = build_run(loaded, folder=Path(folder), registry=registry, exits=exits, before_models=_check_steps)
        # Only now, so that schedules are those of the whole run.
        last = {"max_num_steps": _STEPS, "val_at_start": False, "val_at_end": False}
        algorithm = run.config.algorithm.model_copy(update=last)
        run.config = run.config.model_copy(update={"algorithm": algorithm})
        run.on_step = steps.__setitem__
        loaded.components[name].load()(algorithm, run)
    if _STEPS not in steps:
        raise ConfigError(f"{name} ended before its second step, which is the one that is measured.", key=name)
    metrics = steps[_STEPS]
    phases = {key.removeprefix("time/").removesuffix("_s"): value for key, value in metrics.items() if key.startswith("time/")}
    return MeasuredStep(seconds=phases.pop("step"), phases=phases, completion=metrics.get("length/mean"))


def _check_steps(run: RunConfig, _: object) -> None:
    if run.algorithm.max_num_steps < _STEPS:
        raise ConfigError(
            f"is {run.algorithm.max_num_steps}, but the second step is the one that is measured: allow two steps.",
            key=f"{run.algorithm_name}.max_num_steps",
        )
