"""Loggers of metrics, rollouts and timelines: TensorBoard, Weights & Biases and MLflow, and the interface for others."""

from __future__ import annotations

import csv
import logging
import os
import re
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import yaml

from rl_core.plugins.registry import Registry
from rl_train.config.schema import LoggerConfig
from rl_train.config.values import leaves
from rl_train.errors import RunInterrupted
from rl_train.metrics.logger_config import MlflowConfig, TensorBoardConfig, WandbConfig

FINISH_TIMEOUT_S = 300.0
"""Time limit of the upload at the end of an online run."""
_WANDB_RUN_ID = "wandb_run_id"
_MLFLOW_RUN_ID = "mlflow_run_id"
_INVALID = re.compile(r"[^/\w.\- :]")
_LONGEST_PARAM = 6000
_PARAMS_PER_CALL = 100
"""Limit of MLflow's stores."""


class Logger(ABC):
    """Writes metrics and rollouts. Called only in the driver process; an exception of a method ends the run."""

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the metrics of one step.

        Args:
            metrics: Values by name, such as `reward/mean`; docs/metrics.md has their units. May contain NaN and infinities.
            step: The finished step; 0 is the validation before the first one.
        """

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write the resolved config, without secrets; called once, before the first step."""
        return None

    def log_rollouts(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Write rollouts of one step, at most `logger.num_rollouts_logged`.

        Args:
            rows: One JSON-ready record per rollout, with `prompt`, `completion`, `messages`, `answer`, `reward` and the other
                keys of the table in docs/report.md, "Keys of a rollout".
            step: As in `log_metrics`.
        """
        return None

    def log_timeline(self, timeline: Timeline, step: int) -> None:
        """Write when the phases of a step ran, and what its rollouts waited for; only for runs with rollouts."""
        return None

    def finish(self) -> None:
        """Flush and close; calling it twice is fine.

        If an error or an interruption ends the run, it is called while that exception is handled: `sys.exception()` returns it.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step; all times are in seconds from its start."""

    seconds: float
    """Duration of the step."""
    phases: Sequence[tuple[str, float, float]]
    """Name, start and end of each phase of the step loop, in the order of their ends."""
    waiting: Mapping[str, Sequence[float]]
    """By `engine` and `environment`: the mean number of rollouts that waited for it, in equal parts of the step."""


class TensorBoardLogger(Logger):
    """Writes scalars, and the config as text.

    Args:
        config: `logger.loggers.tensorboard`.
        folder: the run folder.
    """

    def __init__(self, *, config: TensorBoardConfig, folder: Path) -> None:
        self._folder = Path(config.log_dir) if config.log_dir is not None else folder / "tensorboard"
        self._flush_s = config.flush_s
        self._writer: Any = None
        self._hyperparams: str | None = None

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        writer = self._writer_from(step)
        for name, value in metrics.items():
            writer.add_scalar(name, value, global_step=step)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self._hyperparams = yaml.safe_dump(dict(params), sort_keys=False, allow_unicode=True)

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _writer_from(self, step: int) -> Any:
        # A resumed run repeats the steps after its checkpoint. `purge_step` makes TensorBoard drop earlier entries from the
        # first logged step on.
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=step, flush_secs=self._flush_s)
            if self._hyperparams is not None:
                self._writer.add_text("config", f"```yaml\n{self._hyperparams}```", global_step=step)
        return self._writer


_log = logging.getLogger("rlcore")
_COLUMNS = ("prompt", "completion", "reward", "advantage")
"""Columns of the table of completions. The advantage is empty in validations."""


def _table(rows: Sequence[Mapping[str, Any]], step: int, limit: int) -> list[list[Any]]:
    return [[step, *(_encodable(row[name]) for name in _COLUMNS)] for row in rows[:limit]]


def _encodable(value: Any) -> Any:
    """The value; a text with escapes for unpaired surrogates, which UTF-8 cannot encode."""
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


class WandbLogger(Logger):
    """Logs every metric over `step`, and a table of completions; a resumed run keeps its id.

    Args:
        config: `logger.loggers.wandb`. Its mode overrides `WANDB_MODE`.
        folder: the run folder.
    """

    def __init__(self, *, config: WandbConfig, folder: Path) -> None:
        if config.mode == "offline":
            # Must be set before the import: disables crash reports.
            os.environ["WANDB_ERROR_REPORTING"] = "false"
        import wandb

        parent = Path(config.dir) if config.dir is not None else folder
        parent.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            project=config.project,
            entity=config.entity,
            group=config.group,
            job_type=config.job_type,
            name=config.name or folder.name,
            notes=config.notes,
            tags=config.tags or None,
            dir=parent,
            mode=config.mode,
            id=_run_id(folder),
            resume=None if config.mode == "offline" else "allow",
            settings=_settings(config),
        )
        # A resumed run repeats steps, which the library's monotonic step counter would drop.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

        self._limit = config.completions_logged
        self._completions: dict[str, Any] = {}

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, **self._completions, "step": step})
        self._completions = {}

    def log_rollouts(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Keep the table for `log_metrics` of this step, with which it is one entry."""
        import wandb

        if table := _table(rows, step, self._limit):
            columns = ["step", *_COLUMNS]
            self._completions = {"completions": wandb.Table(columns=columns, data=table, allow_mixed_types=True)}

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self._run.config.update(dict(params), allow_val_change=True)

    def finish(self) -> None:
        if self._run is not None:
            error = sys.exception()
            run, self._run = self._run, None
            try:
                run.finish(exit_code=0 if error is None else getattr(error, "exit_code", 1))
            except TimeoutError:
                _log.warning(
                    "wandb: the upload did not end within %g seconds, so the run may be shown as crashed. Its data is complete "
                    "on this machine: upload it with `wandb sync %s`.",
                    FINISH_TIMEOUT_S,
                    Path(run.dir).parent,
                )


def _settings(config: WandbConfig) -> Any:
    import wandb

    # The console logger owns the screen. Machine statistics would access the network (cloud metadata).
    quiet: dict[str, Any] = {"console": "off", "silent": True}
    if config.mode == "online":
        quiet |= {"finish_timeout": FINISH_TIMEOUT_S, "finish_timeout_raises": True}
    if config.mode == "offline":
        quiet |= {"x_disable_machine_info": True, "x_disable_stats": True}
    return wandb.Settings(**quiet)


def _run_id(folder: Path) -> str:
    path = folder / _WANDB_RUN_ID
    if not path.exists():
        path.write_text(secrets.token_hex(4), encoding="utf-8")
    return path.read_text(encoding="utf-8")


class MlflowLogger(Logger):
    """Logs metrics by step, the config as parameters, and completions as the artifacts `completions/step_NNNNNN.csv`.

    A resumed run continues the same MLflow run.

    Args:
        config: `logger.loggers.mlflow`.
        folder: the run folder.
    """

    def __init__(self, *, config: MlflowConfig, folder: Path) -> None:
        # Must be set before the import: disables telemetry and informational log lines.
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        from mlflow import MlflowClient

        self._client: Any = MlflowClient(tracking_uri=config.tracking_uri or f"sqlite:///{folder.resolve()}/mlflow.db")
        self._run_id = self._resume(folder) or self._create(config, folder)
        self._limit, self._finished = config.completions_logged, False

    def log_rollouts(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        if table := _table(rows, step, self._limit):
            text = StringIO()
            csv.writer(text).writerows([("step", *_COLUMNS), *table])
            self._client.log_text(self._run_id, text.getvalue(), f"completions/step_{step:06d}.csv")

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        # MLflow rejects validation/pass@4 and a reward named `right?`.
        named = {_INVALID.sub("_", name.replace("@", "_at_")): value for name, value in metrics.items()}
        self._client.log_batch(self._run_id, metrics=[Metric(name, value, now, step) for name, value in named.items()])

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        values = {name: str(value)[:_LONGEST_PARAM] for name, value in leaves(params)}
        kept = self._client.get_run(self._run_id).data.params
        changed = [name for name, value in values.items() if kept.get(name, value) != value]
        if changed:
            _log.warning("MLflow keeps the first value of a parameter; changed since: %s", ", ".join(changed))
        new = [Param(name, value) for name, value in values.items() if name not in kept]
        for first in range(0, len(new), _PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=new[first : first + _PARAMS_PER_CALL])

    def finish(self) -> None:
        if not self._finished:
            self._client.set_terminated(self._run_id, status=_status_of(sys.exception()))
            self._finished = True

    def _resume(self, folder: Path) -> str | None:
        kept = folder / _MLFLOW_RUN_ID
        if not kept.exists():
            return None
        from mlflow.exceptions import MlflowException

        run_id = kept.read_text(encoding="utf-8")
        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            _log.warning("the MLflow run %s of %s does not exist at this tracking_uri: a new one is created", run_id, folder)
            return None
        return run_id

    def _create(self, config: MlflowConfig, folder: Path) -> str:
        experiment = self._client.get_experiment_by_name(config.experiment_name)
        if experiment is None:
            # A server has its own artifact location; a local store would use the working directory.
            artifacts = None if config.tracking_uri is not None else (folder / "mlflow_artifacts").resolve().as_uri()
            experiment_id = self._client.create_experiment(config.experiment_name, artifact_location=artifacts)
        else:
            experiment_id = experiment.experiment_id
        run = self._client.create_run(experiment_id, run_name=config.run_name or folder.name, tags=dict(config.tags))
        run_id: str = run.info.run_id
        (folder / _MLFLOW_RUN_ID).write_text(run_id, encoding="utf-8")
        return run_id


def _status_of(error: BaseException | None) -> str:
    """MLflow's status of a run that this exception has ended."""
    if error is None:
        return "FINISHED"
    return "KILLED" if isinstance(error, RunInterrupted | KeyboardInterrupt) else "FAILED"


def make_loggers(sections: Mapping[str, LoggerConfig], registry: Registry, folder: Path, exits: ExitStack) -> list[Logger]:
    """The enabled loggers of `logger.loggers`, without the two that every run has; `exits` finishes them."""
    loggers: list[Logger] = []
    for name, section in sections.items():
        if section.enabled:
            loggers.append(registry.find("logger", name).load()(config=section, folder=folder))
            exits.callback(loggers[-1].finish)
    return loggers
