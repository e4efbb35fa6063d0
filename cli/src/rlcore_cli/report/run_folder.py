"""Reads a run folder as plain values; missing files are allowed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rl_core.errors import DataError, UserError
from rl_train.metrics.jsonl import METRICS, TIMELINE, TOKEN_TEXTS, JsonlTail
from rl_train.run_folders.run_names import is_run, runs_in

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
        curves: The same values by name, in order of first appearance.
        config: The resolved config.
        provenance: Origin of each config value: `file`, `overrides`, `values`.
        environment: Versions, plugins, host, start time.
        status: The contents of status.json.
        rollouts: The rollout file of each step.
        timelines: The timeline of each step, with the keys of `rl_train.metrics.logger.Timeline`.
        token_texts: The text of each sampled token id.
    """

    path: Path
    metrics: Mapping[int, Mapping[str, float | None]]
    curves: Mapping[str, Curve] = field(default_factory=dict)
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
        """The number of steps in the config; that of a resume which has not written its config yet."""
        if (planned := (self.status or {}).get("planned_steps")) is not None:
            return int(planned)
        for section in (self.config or {}).values():
            if isinstance(section, Mapping) and "max_num_steps" in section:
                return int(section["max_num_steps"])
        return None

    def names(self) -> list[str]:
        """All metrics, in order of first appearance."""
        return list(self.curves)

    def curve(self, name: str) -> Curve:
        """The curve of a metric; empty if it was never recorded."""
        return self.curves.get(name, Curve(steps=(), values=()))


def read_run_folder(path: Path) -> RunFolder:
    """Reads a run folder, except for the rollouts, which may be large.

    Raises:
        UserError: The folder does not exist or is not a run folder.
        DataError: A file in it is corrupt.
    """
    return RunFolderReader(path).read()


class _Column:
    """The values of a metric that have been read so far."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._values: list[float] = []
        self._not_finite: list[int] = []

    def append(self, step: int, value: float | None) -> None:
        """Add the value of a later step."""
        if value is None:
            self._not_finite.append(step)
        else:
            self._steps.append(step)
            self._values.append(value)

    def curve(self) -> Curve:
        """The values so far; later ones do not change it."""
        return Curve(steps=tuple(self._steps), values=tuple(self._values), not_finite=tuple(self._not_finite))


class RunFolderReader:
    """Reads a run folder repeatedly; later reads parse only what is new.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._metrics_file = JsonlTail(path / METRICS)
        self._timeline_file = JsonlTail(path / TIMELINE)
        self._texts_file = JsonlTail(path / ROLLOUTS / TOKEN_TEXTS)
        self._metrics: dict[int, dict[str, float | None]] = {}
        self._columns: dict[str, _Column] = {}
        self._rollouts: dict[int, Path] = {}
        self._timelines: dict[int, dict[str, Any]] = {}
        self._texts: dict[int, str] = {}
        self._documents: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {}

    def read(self) -> RunFolder:
        """As `read_run_folder`. After an error, use a new reader."""
        _reject_other_folders(self._path)
        self._read_metrics()
        rows, restarted = self._timeline_file.read()
        self._timelines = ({} if restarted else self._timelines) | {row["step"]: row for _, row in rows}
        rows, restarted = self._texts_file.read()
        self._texts = ({} if restarted else self._texts) | {row["id"]: row["text"] for _, row in rows}
        return RunFolder(
            path=self._path,
            metrics=self._metrics,
            curves={name: column.curve() for name, column in self._columns.items()},
            config=self._document(CONFIG, yaml.safe_load),
            provenance=self._document(PROVENANCE, json.loads),
            environment=self._document(ENVIRONMENT, json.loads),
            status=self._document(STATUS, json.loads),
            rollouts=self._read_rollout_files(),
            timelines=self._timelines,
            token_texts=self._texts,
        )

    def _read_metrics(self) -> None:
        rows, restarted = self._metrics_file.read()
        new = dict(sorted(dict(_metrics(self._path / METRICS, rows)).items()))
        last = max(self._metrics, default=-1)
        if restarted or min(new, default=last + 1) <= last:  # steps that were repeated replace earlier ones
            new = new if restarted else dict(sorted((self._metrics | new).items()))
            self._metrics, self._columns = {}, {}
        self._metrics.update(new)
        for step, row in new.items():
            for name, value in row.items():
                self._columns.setdefault(name, _Column()).append(step, value)

    def _read_rollout_files(self) -> Mapping[int, Path]:
        files: dict[int, Path] = {}
        folder = self._path / ROLLOUTS
        with os.scandir(folder) if folder.is_dir() else nullcontext(()) as entries:
            for entry in entries:
                if entry.name.startswith("step_") and entry.name.endswith(".jsonl"):
                    step = int(entry.name[len("step_") : -len(".jsonl")])
                    if step in self._rollouts or entry.stat().st_size > 0:
                        files[step] = folder / entry.name
        self._rollouts = dict(sorted(files.items()))
        return self._rollouts

    def _document(self, name: str, parse: Callable[[str], Any]) -> dict[str, Any] | None:
        """The contents of a file, parsed again only if it has changed."""
        path = self._path / name
        stamp = stamp_of(path)
        if stamp is None:
            return None
        if self._documents.get(name, (None,))[0] != stamp:
            self._documents[name] = (stamp, _read(path, parse))
        return self._documents[name][1]


def stamp_of(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file is written or replaced; None if it does not exist."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _reject_other_folders(path: Path) -> None:
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise UserError(f"{path} {what}. Give a run folder, such as runs/NAME; `rlcore train` prints its run folder.")
    if is_run(path):
        return
    runs = runs_in(path)
    below = f" Run folders inside it: {', '.join(map(str, runs[:8]))}." if runs else " Give a run folder, such as runs/NAME."
    raise UserError(f"{path} is not a run folder: it has neither {METRICS} nor {STATUS}.{below}")


def _read(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise DataError(f"{path} is corrupt: {error}. Remove it to continue without it.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} must be a mapping, found {str(content)[:80]}.")
    return content


def _metrics(path: Path, rows: Sequence[tuple[int, dict[str, Any]]]) -> Iterator[tuple[int, dict[str, float | None]]]:
    for number, row in rows:
        step = row.pop("step", None)
        if not isinstance(step, int):
            raise DataError(
                f"{path}:{number}: the key `step` is missing or not an integer. Remove this line to continue without it."
            )
        yield step, {name: _finite(value) for name, value in row.items() if value is None or isinstance(value, int | float)}


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
