"""Logs metrics to TensorBoard event files. Rollouts are not logged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rl_train.metrics.logger import Logger
from rl_train.metrics.logger_config import TensorBoardConfig


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
