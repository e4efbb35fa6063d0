"""Logs to MLflow, by default to a database in the run folder."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_train.config.dotted_keys import leaves
from rl_train.errors import RunInterrupted
from rl_train.metrics.logger import Logger
from rl_train.metrics.logger_config import MlflowConfig

_log = logging.getLogger("rlcore")
_RUN_ID = "mlflow_run_id"
_INVALID = re.compile(r"[^/\w.\- :]")
_LONGEST_PARAM = 6000
_PARAMS_PER_CALL = 100
"""Limit of MLflow's stores."""


class MlflowLogger(Logger):
    """Logs metrics by step and the config as parameters; a resumed run continues the same MLflow run.

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
        self._finished = False

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        named = {_valid_name(name): value for name, value in metrics.items()}
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
        kept = folder / _RUN_ID
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
        (folder / _RUN_ID).write_text(run_id, encoding="utf-8")
        return run_id


def _status_of(error: BaseException | None) -> str:
    """MLflow's status of a run that this exception has ended."""
    if error is None:
        return "FINISHED"
    return "KILLED" if isinstance(error, RunInterrupted | KeyboardInterrupt) else "FAILED"


def _valid_name(name: str) -> str:
    """A metric's name without the characters that MLflow rejects, such as in validation/pass@4 or a reward named `right?`."""
    return _INVALID.sub("_", name.replace("@", "_at_"))
