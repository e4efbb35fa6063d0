"""What a config may say of each logger that it must name (`logger.loggers.<name>`); imports none of their libraries."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_core.config.schema import LoggerConfig


class TensorBoardConfig(LoggerConfig):
    """Event files for TensorBoard."""

    log_dir: str | None = None
    """Where the event files go; `tensorboard/` in the run folder by default."""
    flush_s: int = Field(default=10, ge=1)
    """Numbers are on disk after at most so many seconds."""


class WandbConfig(LoggerConfig):
    """A run of Weights & Biases."""

    mode: Literal["offline", "online", "shared"] = "offline"
    """Only `online` and `shared` use the network; an offline run is uploaded later with `wandb sync`."""
    project: str = "rlcore"
    """The project."""
    name: str | None = None
    """The run's name; the run folder's by default."""
    entity: str | None = None
    """The user or team; the account's own by default."""
    group: str | None = None
    """Runs of one group are shown together."""
    job_type: str | None = None
    """What kind of run it is, such as `train`."""
    tags: list[str] = Field(default_factory=list)
    """Tags."""
    notes: str | None = None
    """A longer description."""
    dir: str | None = None
    """Parent of its `wandb/` folder; the run folder by default."""


class MlflowConfig(LoggerConfig):
    """A run of MLflow."""

    tracking_uri: str | None = None
    """Its store: a server's address, or `sqlite:///...`; `mlflow.db` in the run folder by default. Never what the
    environment names."""
    experiment_name: str = "rlcore"
    """The experiment; made if it is not there."""
    run_name: str | None = None
    """The run's name; the run folder's by default."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Tags."""
