"""Run folders: which one a run writes to, which checkpoint it resumes from, the locks on what it writes, and its provenance."""

from __future__ import annotations

import datetime
import json
import logging
import os
import platform
import socket
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement

from rl_core.errors import CheckpointError, UserError
from rl_core.plugins.component import Status
from rl_core.plugins.import_path import MODULE_FOLDERS
from rl_core.plugins.manager import PluginManager
from rl_train.checkpoints.manifest import read_state
from rl_train.checkpoints.store import (
    ABANDONED,
    CheckpointStore,
    Retention,
    RunIdentity,
    is_locked,
    lock_folder,
    read_identity,
    refuse_foreign,
    step_of,
    write_identity,
)
from rl_train.config.loader import LoadedConfig
from rl_train.config.schema import CheckpointingConfig, RunConfig
from rl_train.config.sources import PROVENANCE
from rl_train.config.values import Origin
from rl_train.run_folders.status import BUILDING, STATUS

CHECKPOINTS = "checkpoints"
_log = logging.getLogger("rlcore")
CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """The run folder, and the checkpoint that the run starts from."""

    folder: Path
    """The run folder."""
    identity: RunIdentity
    """Identity of the run."""
    checkpoint: Path | None
    """The step folder to resume from; None for a new run."""
    name_note: str = ""
    """Why the folder of a new run does not have the run's name, for the screen; empty if it has."""


def choose_start(config: RunConfig, *, name: str, resume: str) -> ResumePoint:
    """The run folder and the checkpoint for `--resume`.

    `auto` continues the newest run of this name that has a checkpoint and steps left, and starts a new one otherwise; `never`
    starts a new one; a path is a checkpoint, or a run folder, whose newest checkpoint is used. Without checkpointing, `auto`
    starts a new run.

    Args:
        config: the run.
        name: name of the run folder. If it exists, a new run gets `name-2`, `name-3`, ..., unless the existing run failed
            before its first step.
        resume: `auto`, `never` or a path.

    Raises:
        CheckpointError: the path is not a complete checkpoint, or the config does not allow resuming.
    """
    parent = (Path(config.logger.log_dir) / name).parent
    runs = _Runs(parent=parent, name=Path(name).name)
    if resume == "never":
        return runs.new()
    if resume != "auto":
        return _at_path(Path(resume), config.checkpointing, runs)
    newest = _newest_unfinished(config, runs) if config.checkpointing.enabled else None
    return newest or runs.new()


def start_in(folder: Path) -> ResumePoint:
    """A run from its first step in a folder that the caller names."""
    return _Runs(parent=folder.parent, name=folder.name).at(folder)


def lock_run_folder(start: ResumePoint, section: CheckpointingConfig, exits: ExitStack) -> ResumePoint:
    """Create the run folder and the checkpoint folder, lock both for this process, and complete interrupted writes.

    Args:
        start: the run; also from a Python trainer.
        section: `checkpointing`.
        exits: releases the locks.

    Returns:
        `start`; its checkpoint has its final name.

    Raises:
        UserError: another process writes to one of the folders, or it cannot be created.
        CheckpointError: the checkpoint folder belongs to another run.
    """
    store = checkpoint_store(section, start.folder)
    in_run_folder = store.folder == start.folder / CHECKPOINTS
    continues = in_run_folder or (start.checkpoint is not None and start.checkpoint.parent.resolve() == store.folder.resolve())
    if section.enabled:
        # Also checked before the run folder exists, so that a rejected start does not leave one.
        refuse_foreign(store, start.identity, continues=continues)
        if not in_run_folder:
            lock_folder(store.folder, exits, setting="checkpointing.checkpoint_dir")
    lock_folder(start.folder, exits, setting="logger.log_dir")
    write_identity(start.folder, start.identity)
    if section.enabled:
        if in_run_folder:
            lock_folder(store.folder, exits, setting="checkpointing.checkpoint_dir")
        refuse_foreign(store, start.identity, continues=continues)
        write_identity(store.folder, start.identity)
        store.sweep()
        if start.checkpoint is None:
            _sweep_earlier_runs(start)
    if start.checkpoint is not None and not start.checkpoint.is_dir():
        return replace(start, checkpoint=store.path(step_of(start.checkpoint)))
    return start


def lock_again_if_deleted(store: CheckpointStore, start: ResumePoint, exits: ExitStack) -> None:
    """Let `store` lock its folder for this run again if the folder is deleted during the run."""

    def claim_again() -> None:
        _log.warning("%s was deleted during the run, with its checkpoints; it is created again", store.folder)
        lock_folder(store.folder, exits, setting="checkpointing.checkpoint_dir")
        write_identity(store.folder, start.identity)

    store.on_deleted = claim_again


def _sweep_earlier_runs(start: ResumePoint) -> None:
    """Delete what runs of this name left behind that were killed in their first checkpoint, and so are never resumed."""
    for folder in _Runs(parent=start.folder.parent, name=start.identity.name).existing():
        store = CheckpointStore(folder / CHECKPOINTS)
        if store.folder.is_dir() and not store.named_steps() and folder != start.folder:
            # A folder that is in use belongs to a run that is writing its first checkpoint.
            with ExitStack() as exits, suppress(UserError):
                lock_folder(store.folder, exits, setting="checkpointing.checkpoint_dir")
                store.sweep()


def checkpoint_store(section: CheckpointingConfig, folder: Path) -> CheckpointStore:
    """The checkpoints of the run whose folder is `folder`."""
    retention = Retention(
        keep_latest_k=section.keep_latest_k,
        keep_top_k=section.keep_top_k,
        metric_name=section.metric_name,
        higher_is_better=section.higher_is_better,
        save_period=section.save_period,
    )
    return CheckpointStore(Path(section.checkpoint_dir) if section.checkpoint_dir else folder / CHECKPOINTS, retention)


@dataclass(frozen=True, kw_only=True)
class _Runs:
    """The run folders of one name."""

    parent: Path
    name: str

    def existing(self) -> list[Path]:
        """Folders of runs of this name, oldest first."""
        return [folder for _, folder in sorted(self._numbered().items()) if self._is_own(folder)]

    def new(self) -> ResumePoint:
        """A new run in the next free folder, or in the newest one if its run failed before its first step."""
        existing, numbered = self.existing(), self._numbered()
        if existing and existing[-1] == numbered[max(numbered)] and _failed_before_first_step(existing[-1]):
            return self.at(existing[-1])
        number = max(numbered) + 1 if existing or 1 in numbered else 1
        folder = self.parent / (self.name if number == 1 else f"{self.name}-{number}")
        note = "" if number == 1 else _occupied(existing[-1] if existing else numbered[1])
        return ResumePoint(
            folder=folder, identity=RunIdentity.new(name=self.name, folder=folder), checkpoint=None, name_note=note
        )

    def at(self, folder: Path, checkpoint: Path | None = None) -> ResumePoint:
        """The run in an existing folder, which may have been moved."""
        identity = read_identity(folder)
        if identity is None:
            identity = RunIdentity.new(name=self.name if folder in self.existing() else folder.name, folder=folder)
        return ResumePoint(folder=folder, identity=replace(identity, folder=str(folder.absolute())), checkpoint=checkpoint)

    def _numbered(self) -> dict[int, Path]:
        """Every folder called `name` (1) or `name-N` (N), also of other runs: the second run of `a` is called `a-2`."""
        numbered: dict[int, Path] = {}
        for folder in self.parent.iterdir() if self.parent.is_dir() else ():
            base, _, number = folder.name.rpartition("-")
            if not folder.is_dir():
                continue
            if folder.name == self.name:
                numbered[1] = folder
            elif base == self.name and number.isdecimal() and int(number) > 1:
                numbered[int(number)] = folder
        return numbered

    def _is_own(self, folder: Path) -> bool:
        identity = read_identity(folder)
        return identity is None or identity.name == self.name


def _newest_unfinished(config: RunConfig, runs: _Runs) -> ResumePoint | None:
    """The newest run of this name with a checkpoint, unless all of its steps are done."""
    section = config.checkpointing
    for folder in reversed(runs.existing()):
        latest = _latest_of(folder, section)
        if latest is not None:
            ended = _has_finished_epochs(folder, latest, config) or _was_stopped(folder, latest)
            unfinished = step_of(latest) < config.algorithm.max_num_steps and not ended
            return runs.at(folder, latest) if unfinished else None
    # The checkpoint folder may exist without the run folder, for example on a shared disk that another machine mounts.
    elsewhere = checkpoint_store(section, runs.parent)
    owner = read_identity(elsewhere.folder)
    if section.checkpoint_dir is None or owner is None or owner.name != runs.name or Path(owner.folder).is_dir():
        return None
    latest = elsewhere.latest_undamaged()
    if latest is None or step_of(latest) >= config.algorithm.max_num_steps:
        return None
    folder = runs.new().folder
    return ResumePoint(folder=folder, identity=replace(owner, folder=str(folder.absolute())), checkpoint=latest)


def _has_finished_epochs(folder: Path, latest: Path, config: RunConfig) -> bool:
    """Whether the run in `folder` finished after the epochs of this config; their number of steps depends on the data."""
    status = _status_of(folder)
    if config.algorithm.max_num_epochs is None or status.get("state") != "finished" or status.get("steps") != step_of(latest):
        return False
    before = read_state(latest)["config"].get(config.algorithm_name)
    return isinstance(before, dict) and before.get("max_num_epochs") == config.algorithm.max_num_epochs


def _was_stopped(folder: Path, latest: Path) -> bool:
    """Whether a control ended the run in `folder` with this checkpoint."""
    status = _status_of(folder)
    return status.get("stopped") is not None and status.get("steps") == step_of(latest)


def _latest_of(folder: Path, section: CheckpointingConfig | None) -> Path | None:
    """The newest checkpoint of the run in `folder`: in that folder, in the configured one, or in that of its last process."""
    configured = section.checkpoint_dir if section is not None else None
    stores = [
        folder / CHECKPOINTS,
        *(Path(path) for path in (configured, recorded_checkpoint_dir(folder)) if path is not None),
    ]
    identity = read_identity(folder)
    candidates: list[Path] = []
    for path in stores:
        owner = read_identity(path)
        is_own = path == folder / CHECKPOINTS or (
            owner is not None and identity is not None and owner.run_id == identity.run_id
        )
        latest = CheckpointStore(path).latest_undamaged() if is_own else None
        if latest is not None:
            candidates.append(latest)
    return max(candidates, key=step_of, default=None)


def recorded_checkpoint_dir(folder: Path) -> str | None:
    """The `checkpoint_dir` in the config of a run folder; None if it has none, or its config cannot be read."""
    try:
        config = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    section = config.get("checkpointing") if isinstance(config, dict) else None
    elsewhere = section.get("checkpoint_dir") if isinstance(section, dict) else None
    return elsewhere if isinstance(elsewhere, str) else None


def _at_path(path: Path, section: CheckpointingConfig, runs: _Runs) -> ResumePoint:
    if not section.enabled:
        raise CheckpointError(
            f"--resume {path} needs checkpointing, but checkpointing.enabled is false. Set it to true; or, to start a new run "
            f"from these weights, use --resume never with policy.model_name={path / 'policy' / 'weights'}."
        )
    if (path / CHECKPOINTS).is_dir() or (path / CONFIG).is_file():
        latest = _latest_of(path, None)
        if latest is None:
            raise CheckpointError(f"The run folder {path} has no complete checkpoint. Start a new run with --resume never.")
        return runs.at(path, latest)
    if not path.exists():
        raise CheckpointError(
            f"--resume {path}: there is no such checkpoint or run folder. `auto`, the default, continues the newest unfinished "
            "run of this name from its newest checkpoint; `never` starts a new run."
        )
    read_state(path)
    owner = read_identity(path.parent)
    # A copied run continues in the copy.
    for folder in (path.parent.parent, Path(owner.folder)) if owner is not None else ():
        identity = read_identity(folder)
        if owner is not None and identity is not None and identity.run_id == owner.run_id:
            return runs.at(folder, path)
    if owner is None and path.parent.name == CHECKPOINTS:
        return runs.at(path.parent.parent, path)
    new = runs.new()
    if owner is not None and checkpoint_store(section, new.folder).folder.resolve() == path.parent.resolve():
        # The run folder does not exist any more, so the run continues in a new one.
        return ResumePoint(folder=new.folder, identity=replace(owner, folder=new.identity.folder), checkpoint=path)
    return ResumePoint(folder=new.folder, identity=new.identity, checkpoint=path)


def _failed_before_first_step(folder: Path) -> bool:
    """Whether its run ended before its first step, by an error or Ctrl-C, so that its folder can be reused."""
    checkpoints = folder / CHECKPOINTS
    has_steps = checkpoints.is_dir() and any(entry.name.startswith(("step_", ABANDONED)) for entry in checkpoints.iterdir())
    if has_steps or (folder / "metrics.jsonl").exists():
        return False
    status = _status_of(folder)
    return status.get("state") in ("failed", "interrupted") and status.get("during") == BUILDING


def _occupied(folder: Path) -> str:
    """Why a new run does not use a folder."""
    status = _status_of(folder)
    state = status.get("stopped", status.get("state", "without status.json"))
    reason = "belongs to a run in progress" if is_locked(folder) else f"exists ({state})"
    return f", because {folder} {reason}; logger.run_name=NAME chooses another name"


def _status_of(folder: Path) -> dict[str, Any]:
    """status.json of a run; empty if it has none, or another process is writing to it."""
    try:
        status = json.loads((folder / STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


def write_origins(folder: Path, loaded: LoadedConfig, manager: PluginManager) -> None:
    """Write config.yaml, provenance.json and environment.json; a resume replaces them.

    Args:
        folder: the run folder.
        loaded: the config.
        manager: the plugins of this process.
    """
    (folder / CONFIG).write_text(loaded.to_yaml(), encoding="utf-8")
    provenance = {
        "file": str(loaded.path),
        "folders": [*dict.fromkeys([os.getcwd(), *MODULE_FOLDERS])],
        "overrides": list(loaded.overrides),
        "values": {key: _origin(origin) for key, origin in loaded.source.items()},
    }
    _write_json(folder / PROVENANCE, provenance)
    _write_json(folder / ENVIRONMENT, environment(manager))


def environment(manager: PluginManager) -> dict[str, Any]:
    """This process, its plugins, and the installed versions of their requirements. Does not import them."""
    ready = [plugin for plugin in manager.plugins if plugin.status is Status.READY]
    required = {
        Requirement(check.requirement).name: check.installed
        for plugin in ready
        for check in plugin.requirements
        if check.installed is not None
    }
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "plugins": {plugin.name: f"{plugin.distribution} {plugin.version}" for plugin in ready},
        "distributions": dict(sorted(required.items())),
    }


def _origin(origin: Origin) -> dict[str, str]:
    location = origin.location
    kind = "default" if location is None else "file" if location.number is None else "override"
    return {"kind": kind, "source": str(origin)}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
