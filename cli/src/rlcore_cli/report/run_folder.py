"""Reads a run folder as plain values; missing files are allowed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rl_core.errors import DataError, UserError
from rl_train.metrics.jsonl import METRICS, TIMELINE, TOKEN_TEXTS, iter_jsonl

STATUS = "status.json"
CONFIG = "config.yaml"
PROVENANCE = "provenance.json"
ENVIRONMENT = "environment.json"
ROLLOUTS = "rollouts"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A metric and the steps at which it was recorded.

    Attributes:
        steps: In ascending order.
        values: One finite value per step.
        not_finite: Steps with a NaN or infinite value.
    """

    steps: Sequence[int]
    values: Sequence[float]
    not_finite: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """The contents of a run folder; missing files are empty or None.

    Attributes:
        path: The folder.
        metrics: Metrics by step (ascending) and name; None stands for NaN and infinite values.
        config: The resolved config.
        provenance: Origin of each config value: `file`, `overrides`, `values`.
        environment: Versions, plugins, host, start time.
        status: The contents of status.json.
        rollouts: The rollout file of each step.
        timelines: The timeline of each step, with the keys of `rl_train.metrics.timeline.Timeline`.
        token_texts: The text of each sampled token id.
    """

    path: Path
    metrics: Mapping[int, Mapping[str, float | None]]
    config: Mapping[str, Any] | None = None
    provenance: Mapping[str, Any] | None = None
    environment: Mapping[str, Any] | None = None
    status: Mapping[str, Any] | None = None
    rollouts: Mapping[int, Path] = field(default_factory=dict)
    timelines: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    token_texts: Mapping[int, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.resolve().name

    @property
    def last_step(self) -> int | None:
        """The last recorded step."""
        return max(self.metrics, default=None)

    @property
    def planned_steps(self) -> int | None:
        """The number of steps in the config."""
        for section in (self.config or {}).values():
            if isinstance(section, Mapping) and "max_num_steps" in section:
                return int(section["max_num_steps"])
        return None

    def names(self) -> list[str]:
        """All metrics, in order of first appearance."""
        return list(dict.fromkeys(name for row in self.metrics.values() for name in row))

    def curve(self, name: str) -> Curve:
        """The curve of a metric; empty if it was never recorded."""
        recorded = [(step, row[name]) for step, row in self.metrics.items() if name in row]
        finite = [(step, value) for step, value in recorded if value is not None]
        return Curve(
            steps=tuple(step for step, _ in finite),
            values=tuple(value for _, value in finite),
            not_finite=tuple(step for step, value in recorded if value is None),
        )


def read_run_folder(path: Path) -> RunFolder:
    """Reads a run folder, except for the rollouts, which may be large.

    Raises:
        UserError: The folder does not exist or is not a run folder.
        DataError: A file in it is corrupt.
    """
    _reject_other_folders(path)
    config = _read(path / CONFIG, yaml.safe_load)
    return RunFolder(
        path=path,
        metrics=_metrics(path / METRICS),
        config=config,
        provenance=_read(path / PROVENANCE, json.loads),
        environment=_read(path / ENVIRONMENT, json.loads),
        status=_read(path / STATUS, json.loads),
        rollouts={
            int(file.stem.removeprefix("step_")): file
            for file in sorted(path.glob(f"{ROLLOUTS}/step_*.jsonl"))
            if file.stat().st_size > 0
        },
        timelines={row["step"]: row for row in iter_jsonl(path / TIMELINE)},
        token_texts={row["id"]: row["text"] for row in iter_jsonl(path / ROLLOUTS / TOKEN_TEXTS)},
    )


def _reject_other_folders(path: Path) -> None:
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise UserError(f"{path} {what}. Give a run folder, such as runs/NAME; `rlcore train` prints its run folder.")
    if is_run(path):
        return
    runs = sorted(folder for folder in path.iterdir() if folder.is_dir() and is_run(folder))
    below = f" Run folders inside it: {', '.join(map(str, runs[:8]))}." if runs else " Give a run folder, such as runs/NAME."
    raise UserError(f"{path} is not a run folder: it has neither {METRICS} nor {STATUS}.{below}")


def is_run(path: Path) -> bool:
    """Whether a folder is a run folder."""
    return any((path / name).is_file() for name in (METRICS, STATUS))


def _read(path: Path, parse: Any) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise DataError(f"{path} is corrupt: {error}. Remove it to continue without it.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} must be a mapping, found {str(content)[:80]}.")
    return content


def _metrics(path: Path) -> dict[int, dict[str, float | None]]:
    rows: dict[int, dict[str, float | None]] = {}
    for number, row in enumerate(iter_jsonl(path), start=1):
        step = row.pop("step", None)
        if not isinstance(step, int):
            raise DataError(
                f"{path}:{number}: the key `step` is missing or not an integer. Remove this line to continue without it."
            )
        rows[step] = {name: _finite(value) for name, value in row.items() if value is None or isinstance(value, int | float)}
    return dict(sorted(rows.items()))


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
