"""Runs a config file: validate, build, resume, train, and close everything at the end."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rl_core.config.schema import GenerationConfig, PolicyConfig
from rl_core.data.tokenizer import decode
from rl_core.errors import ConfigError, NotSupportedError, UserError
from rl_core.plugins.manager import PluginManager, discover
from rl_core.plugins.registry import Registry
from rl_train.assembly.run_assembly import build_run
from rl_train.checkpoints.inputs import ComparedConfig
from rl_train.checkpoints.manifest import read_state
from rl_train.checkpoints.state import resumable_state
from rl_train.config.loader import LoadedConfig, load_config, precisions_of, saved_precisions, with_precisions
from rl_train.config.rules.components import validates
from rl_train.config.rules.models import loaded_models
from rl_train.config.rules.rule import Stage
from rl_train.config.schedules import schedule_changes
from rl_train.config.schema import RunConfig
from rl_train.config.sources import ConfigFiles
from rl_train.control import add_callbacks, call_event, callbacks_of, keep_state, run_events
from rl_train.launch.session import Session, open_session
from rl_train.metrics.console import ConsoleLogger, SamplePrinter
from rl_train.metrics.jsonl import METRICS, JsonlLogger, iter_jsonl
from rl_train.metrics.progress import progress_file, reported_start
from rl_train.plan.suggestions import warn_if_too_large
from rl_train.plugin_warnings import plugin_warnings
from rl_train.run import Run
from rl_train.run_folders.run_folder import (
    CONFIG,
    ResumePoint,
    lock_again_if_deleted,
    write_origins,
)
from rl_train.run_folders.status import Status

_log = logging.getLogger("rlcore")


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a finished run."""

    folder: Path
    """The run folder."""
    steps: int
    """Total number of steps."""
    stopped: str | None
    """Why it ended before its last step; None if it did not."""
    resumed_from: int
    """Steps done by earlier processes."""
    seconds: float
    """From loading the config to the end."""
    training_seconds: float
    """Time in steps, including those of earlier processes."""


def train(
    config_path: ConfigFiles,
    overrides: Sequence[str] = (),
    *,
    resume: str = "auto",
    allow_config_change: bool = False,
    console: bool = True,
    show_samples: int | None = None,
    replay: Path | None = None,
) -> RunResult:
    """Run the config's algorithm to its last step.

    Args:
        config_path: the YAML file, or several that are layered, the last one on top.
        overrides: `key=value` each.
        resume: `auto`, `never`, or the path of a checkpoint or run folder.
        allow_config_change: resume although the checkpoint was written with another config.
        console: show progress on standard output.
        show_samples: number of steps from one prompt shown with its best and its worst sample to the next; None shows none.
        replay: folder of a run of this config: train on its recorded rollouts instead of sampling. The run is a new one, unless
            `resume` is a path.

    Raises:
        ConfigError: the config is invalid; nothing was started.
        CheckpointError: the checkpoint cannot be resumed; nothing was trained.
        RunInterrupted: a signal (Ctrl-C, SIGTERM, SIGHUP) or `checkpointing.max_time`; the last step has a checkpoint, unless
            a second signal stopped the run at once.
    """
    started = time.perf_counter()
    manager = discover()
    registry = Registry(manager)
    loaded = load_config(config_path, overrides, registry=registry, stages=(Stage.STATIC, Stage.MACHINE))
    resume = _checked_options(loaded.run, resume=resume, show_samples=show_samples, replay=replay)
    with open_session(loaded, resume=resume, console=console, since=started) as session:
        loaded = _begin(session.start, loaded, manager)
        callbacks = callbacks_of(loaded.run)
        add_callbacks(manager, callbacks)
        run = _build(session, loaded, registry, allow_config_change=allow_config_change, replay=replay)
        if run.checkpoints is not None:
            lock_again_if_deleted(run.checkpoints.store, session.start, session.exits)
            if session.start.checkpoint is not None:
                _restore(run, session, session.start.checkpoint, allow_config_change=allow_config_change)
                _move_later_checkpoints(run, session)
        # With the choices made for the devices. Only now: a rejected config must not replace that of the run.
        write_origins(run.folder, with_precisions(loaded, precisions_of(run.config)), manager)
        session.show(f"ready after {time.perf_counter() - started:.0f} s")
        _attach_loggers(run, session, loaded, show_samples=show_samples)
        keep_state(run, callbacks)
        _report_start(run, manager, session.status, since=started)
        loop_started = time.perf_counter()
        session.stop.end_after_step(run)
        with run_events(run, manager):
            session.status.running()
            loaded.components[run.config.algorithm_name].load()(run.config.algorithm, run)
            run.warnings.finish()
        if run.control.stopped is not None:
            session.status.stopped(run.step, run.control.stopped)
        ended = time.perf_counter()
    return RunResult(
        folder=run.folder,
        steps=run.config.algorithm.max_num_steps if run.control.stopped is None else run.step,
        stopped=run.control.stopped,
        resumed_from=run.first_step,
        seconds=ended - started,
        training_seconds=ended - loop_started + _trained_seconds(run.folder, up_to=run.first_step),
    )


def _build(
    session: Session, loaded: LoadedConfig, registry: Registry, *, allow_config_change: bool, replay: Path | None
) -> Run:
    """Build the run; a checkpoint that it cannot resume from is rejected before models are loaded."""
    config, checkpoint = loaded.run, session.start.checkpoint

    def before_models(_: RunConfig, compared: ComparedConfig) -> None:
        if checkpoint is not None:
            resumable_state(checkpoint, compared, allow_config_change=allow_config_change)
            session.status.building(config.algorithm.max_num_steps)
        warn_if_too_large(config, registry)
        session.show(f"starting {_worker_names(config, samples=replay is None or validates(config))}")

    with (
        reported_start("starting workers and loading models:", session.show) as describe,
        progress_file(session.start.folder, describe),
    ):
        return build_run(
            loaded,
            folder=session.start.folder,
            registry=registry,
            exits=session.exits,
            before_models=before_models,
            replay=replay,
        )


def _trained_seconds(folder: Path, *, up_to: int) -> float:
    """Time of the steps that earlier processes of the run have done."""
    return sum(row.get("time/step_s") or 0.0 for row in iter_jsonl(folder / METRICS) if row["step"] <= up_to) if up_to else 0.0


def _begin(start: ResumePoint, loaded: LoadedConfig, manager: PluginManager) -> LoadedConfig:
    """Record the config of a new run; the config of a resumed run, with the checkpoint's `precision` if it sets none."""
    for warning in plugin_warnings(manager):
        _log.warning("%s", warning)
    if start.checkpoint is not None:
        return with_precisions(loaded, saved_precisions(read_state(start.checkpoint)["config"]))
    write_origins(start.folder, loaded, manager)
    return loaded


def _checked_options(config: RunConfig, *, resume: str, show_samples: int | None, replay: Path | None) -> str:
    """`resume`, where a replay is a new run by default, not a continuation of the run that it replays."""
    for option, value in {"--show-samples": show_samples, "--replay": replay}.items():
        if value is not None and config.algorithm.runtime_needs.rollouts is None:
            raise ConfigError(f"{option} has no effect: {config.algorithm_name} does not sample. Remove it.")
    if replay is None:
        return resume
    _check_replay(replay)
    return "never" if resume == "auto" else resume


def _check_replay(folder: Path) -> None:
    if not any((folder / "rollouts").glob("step_*.jsonl")):
        raise UserError(f"--replay {folder}: this is not the folder of a run with recorded rollouts (rollouts/step_*.jsonl).")
    recorded = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8")) if (folder / CONFIG).is_file() else {}
    if (recorded.get("logger") or {}).get("num_rollouts_logged") is not None:
        raise UserError(
            f"--replay {folder}: this run recorded only some rollouts of each step (logger.num_rollouts_logged). Replay a run "
            "that recorded all of them."
        )


def _restore(run: Run, session: Session, checkpoint: Path, *, allow_config_change: bool) -> None:
    """Restore the run, and warn about differences from the config of the checkpoint."""
    assert run.checkpoints is not None
    # Its files were verified against their digests before the models were loaded.
    run.first_step = run.checkpoints.restore(checkpoint, allow_config_change=allow_config_change, verify=False)
    session.show(f"resumed from {checkpoint}: {run.first_step} steps done")
    if changes := run.checkpoints.changes():
        _log.warning("resumed with a changed config, which applies from step %s on:\n%s", run.first_step + 1, changes)
    trained_steps = {}
    for name, model in run.checkpoints.models.items():
        with suppress(NotSupportedError):
            trained_steps[name] = model.weight_version
    for line in run.control.continue_resumed(run):
        session.show(line)
    for message in schedule_changes(run.config, run.checkpoints.restored.get("schedule_lengths", {}), trained_steps):
        _log.warning("%s", message)


def _move_later_checkpoints(run: Run, session: Session) -> None:
    """Move checkpoints of later steps, and a copy of the metrics, to a folder that later resumes ignore."""
    assert run.checkpoints is not None
    archive = run.checkpoints.store.set_aside(after=run.first_step)
    if archive is None:
        return
    metrics = run.folder / METRICS
    if metrics.is_file():
        shutil.copyfile(metrics, archive / METRICS)
    names = ", ".join(sorted(path.name for path in archive.glob("step_*")))
    session.show(f"moved to {archive}: {names}, which are later than the step resumed from; delete them to free disk space")


def _worker_names(config: RunConfig, *, samples: bool) -> str:
    """The workers to be started, for the screen."""
    models: dict[str, PolicyConfig | GenerationConfig] = {**loaded_models(config)}
    if samples and config.policy.generation is not None:
        models["generation"] = config.policy.generation
    named = [f"{name} {section.backend}" for name, section in models.items()]
    return ", ".join([*named, *(f"env {task}" for task in config.env if samples)])


def _attach_loggers(run: Run, session: Session, loaded: LoadedConfig, *, show_samples: int | None) -> None:
    files = JsonlLogger(run.folder, resume_from=run.first_step, token_text=lambda token: decode(run.tokenizer, [token]))
    always: list[Any] = [files]
    total = run.config.algorithm.max_num_steps
    if session.console:
        screen = ConsoleLogger(
            total_steps=total,
            first_step=run.first_step,
            earlier_s=_trained_seconds(run.folder, up_to=run.first_step),
            clip_norm=run.config.policy.max_grad_norm,
            describe=lambda: str(run.metrics.progress),
        )
        always.append(screen)
        if show_samples is not None:
            run.on_rollouts = SamplePrinter(show_samples, screen.show)
    session.exits.enter_context(progress_file(run.folder, lambda: f"step {run.step}/{total}  {run.metrics.progress}"))
    for logger in always:
        session.exits.callback(logger.finish)
    run.loggers = [*always, *run.loggers]
    for logger in run.loggers:
        logger.log_hyperparams(loaded.redacted)


def _report_start(run: Run, manager: PluginManager, status: Status, *, since: float) -> None:
    """Report each step of the run to status.json and to the plugins, which may control it."""
    if run.time_limit is not None:
        run.time_limit.started = since
    if run.first_step:
        run.warnings.replay(row for row in iter_jsonl(run.folder / METRICS) if row["step"] <= run.first_step)
    teacher = None if run.teacher is run.policy else run.teacher
    components = {"policy": run.policy, "value": run.value, "teacher": teacher, "generation": run.generation}
    components |= {f"teachers.{task}": each for task, each in run.teachers.items()}
    status.set_workers(components, phase=lambda: run.metrics.phase, steps=run.config.algorithm.max_num_steps)

    def on_step(step: int, metrics: Mapping[str, float]) -> None:
        status.running()
        run.control.apply(run, step, call_event(manager, "rlcore_step_finished", run=run, step=step, metrics=metrics))

    run.on_step = on_step
