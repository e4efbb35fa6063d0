"""Sections of the loggers that a config must name (`logger.loggers.<name>`). Does not import their libraries."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_train.config.schema import LoggerConfig


class TensorBoardConfig(LoggerConfig):
    """TensorBoard event files."""

    log_dir: str | None = None
    """Folder of the event files; defaults to `tensorboard/` in the run folder."""
    flush_s: int = Field(default=10, ge=1)
    """Maximum number of seconds before metrics are written to disk."""


class TableConfig(LoggerConfig):
    """Logger with a table of completions."""

    completions_logged: int = Field(default=8, ge=0)
    """Maximum number of rollouts of each step in the table of completions: the first ones. 0 writes no table."""


class WandbConfig(TableConfig):
    """Weights & Biases run."""

    mode: Literal["offline", "online", "shared"] = "offline"
    """Only `online` and `shared` use the network. Upload an offline run later with `wandb sync`."""
    project: str = "rlcore"
    """Name of the project."""
    name: str | None = None
    """Name of the run; defaults to the name of the run folder."""
    entity: str | None = None
    """User or team; defaults to that of the account."""
    group: str | None = None
    """Group of the run; the W&B interface shows the runs of a group together."""
    job_type: str | None = None
    """Job type of the run, such as `train`, by which the W&B interface can group runs."""
    tags: list[str] = Field(default_factory=list)
    """Tags of the run."""
    notes: str | None = None
    """Description of the run."""
    dir: str | None = None
    """Parent folder of the `wandb/` folder; defaults to the run folder."""


class MlflowConfig(TableConfig):
    """MLflow run."""

    tracking_uri: str | None = None
    """Tracking store: address of a server or `sqlite:///...`; defaults to `mlflow.db` in the run folder. `MLFLOW_TRACKING_URI`
    is ignored."""
    experiment_name: str = "rlcore"
    """Name of the experiment; created if it does not exist."""
    run_name: str | None = None
    """Name of the run; defaults to the name of the run folder."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Tags of the run."""
