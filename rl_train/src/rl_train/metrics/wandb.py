"""Logs to Weights & Biases, offline by default."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_train.metrics.logger import Logger
from rl_train.metrics.logger_config import WandbConfig

FINISH_TIMEOUT_S = 300.0
"""Time limit of the upload at the end of an online run."""
_RUN_ID = "wandb_run_id"
_log = logging.getLogger("rlcore")


class WandbLogger(Logger):
    """Logs every metric over `step`; a resumed run keeps its id.

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

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "step": step})

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
    path = folder / _RUN_ID
    if not path.exists():
        path.write_text(secrets.token_hex(4), encoding="utf-8")
    return path.read_text(encoding="utf-8")
