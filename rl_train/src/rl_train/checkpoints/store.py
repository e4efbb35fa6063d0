"""The checkpoint folder of a run: step folders, who owns it, which steps are kept, and the time limit of a run.

Step folders are written atomically: under another name, synced, then renamed. The caller writes their content. A folder is
owned by a run (`run.json`), and by a process (`.lock`).
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from rl_core.errors import CheckpointError, CheckpointWriteError, RLCoreError, UserError, WorkerError
from rl_train.checkpoints.disk_space import write_error
from rl_train.checkpoints.manifest import MANIFEST, STEP_FOLDER, damage_error, read_manifest, without_manifest, write_manifest
from rl_train.files import sync, write_atomically

_log = logging.getLogger("rlcore")
_COMPLETE = ".complete"
_PARTIAL = ".partial"
ABANDONED = "abandoned_"
"""Prefix of folders with checkpoints that a resume from an earlier step has moved away."""
RUN = "run.json"
LOCK = ".lock"


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints are kept: the newest, and the best by a metric."""

    keep_latest_k: int = 2
    keep_top_k: int | None = None
    metric_name: str | None = None
    higher_is_better: bool = True
    save_period: int = 1
    """Steps between checkpoints; those of an interrupted run are in between, where validation may not be due."""


class CheckpointStore:
    """Checkpoints of one run, `step_000010/` and so on.

    A folder named `step_N` is complete: it gets that name only after every file is on disk, and loses it before it is
    deleted. So an entry of that name without a manifest is damaged, never the result of a kill. Other names that a killed
    process can leave behind:

    - `step_N.partial` is being written or deleted; `sweep` deletes it.
    - `step_N.complete` is a complete second version of step N that has not replaced the first one yet; `sweep` completes that.

    Only the process that holds the folder (`ownership.lock_folder`) may call `sweep`, `write` and `set_aside`.

    Args:
        folder: parent of the step folders; created by the first write.
        retention: which checkpoints to keep.

    Attributes:
        on_deleted: called by `write` after it has created the folder; set it once the folder exists.
    """

    def __init__(self, folder: Path, retention: Retention | None = None) -> None:
        self.folder = folder
        self.on_deleted: Callable[[], None] | None = None
        self._retention = retention or Retention()
        self._has_warned = False

    def sweep(self) -> None:
        """Complete or delete what a killed process left behind."""
        for complete in sorted(self.folder.glob(f"step_*{_COMPLETE}")):
            self._replace(complete, complete.with_suffix(""))
        for partial in sorted(self.folder.glob(f"step_*{_PARTIAL}")):
            _delete(partial)

    def write(self, step: int, fill: Callable[[Path], None], metrics: Mapping[str, float]) -> Path:
        """Write the checkpoint of `step`, then delete the ones that retention does not keep; never the one just written.

        Args:
            step: number of completed steps.
            fill: writes all files to the given folder.
            metrics: metrics for the ranking of checkpoints.

        Raises:
            CheckpointWriteError: the disk is full, or cannot be written to. The incomplete files are removed then, as after
                any other error and after an interruption.
        """
        final, finite = self.path(step), {name: value for name, value in metrics.items() if math.isfinite(value)}
        partial = self._write_partial(step, fill, finite)
        if final.exists():
            complete = final.with_name(final.name + _COMPLETE)
            if complete.exists():
                self._discard(complete)
            os.replace(partial, complete)
            sync(self.folder)
            self._replace(complete, final)
        else:
            os.replace(partial, final)
            sync(self.folder)
        self._prune(just_written=step)
        return final

    def try_write(self, fill: Callable[[Path], None]) -> None:
        """Write the files of a checkpoint before the first step, and remove them.

        Raises:
            CheckpointWriteError: they cannot be written.
        """
        try:
            _delete(self._write_partial(0, fill, {}))
        except Exception as error:
            if isinstance(error, RLCoreError) and type(error) is not WorkerError:
                raise
            raise CheckpointWriteError(
                f"A checkpoint of this run cannot be written to {self.folder}: {type(error).__name__}: {error}. This was tried "
                "before the first step, without weights. Fix the file or component that the error names, or set "
                "checkpointing.enabled: false."
            ) from error

    def _write_partial(self, step: int, fill: Callable[[Path], None], metrics: Mapping[str, float]) -> Path:
        partial = self.path(step).with_name(self.path(step).name + _PARTIAL)
        _delete(partial)
        try:
            if not self.folder.is_dir():
                self.folder.mkdir(parents=True)
                if self.on_deleted is not None:
                    self.on_deleted()
            partial.mkdir()
            fill(partial)
            write_manifest(partial, step=step, metrics=metrics)
            for path in [*partial.rglob("*"), partial]:
                sync(path)
        except BaseException as error:
            explained = write_error(error, step=step, folder=self.folder, latest=self.latest())
            shutil.rmtree(partial, ignore_errors=True)
            if explained is not None:
                raise explained from error
            raise
        return partial

    @property
    def most_at_once(self) -> int:
        """Maximum number of checkpoints on disk at the same time: those that are kept, and the one being written."""
        return self._retention.keep_latest_k + (self._retention.keep_top_k or 0) + 1

    def path(self, step: int) -> Path:
        """The folder of the checkpoint of `step`, whether it exists or not."""
        return self.folder / f"step_{step:06d}"

    def find(self, step: int) -> Path:
        """The folder of the complete checkpoint of `step`, also between a kill and the next `sweep`."""
        complete = self.path(step).with_suffix(_COMPLETE)
        return complete if complete.is_dir() else self.path(step)

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        return [step for step in self.named_steps() if (self.find(step) / MANIFEST).is_file()]

    def named_steps(self) -> list[int]:
        """Steps with a folder, or anything else, that has the name of a complete checkpoint; oldest first."""
        if not self.folder.is_dir():
            return []
        found = (STEP_FOLDER.match(entry.name) for entry in self.folder.iterdir())
        return sorted({int(match.group(1)) for match in found if match})

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        steps = self.steps()
        return self.find(steps[-1]) if steps else None

    def latest_undamaged(self) -> Path | None:
        """The newest checkpoint, to be loaded; its files are not compared with their digests.

        Raises:
            CheckpointError: it has no manifest, which only damage can cause; an older one is not loaded instead.
        """
        steps = self.named_steps()
        if not steps:
            return None
        newest = self.find(steps[-1])
        if not (newest / MANIFEST).is_file():
            raise damage_error(newest, [without_manifest(newest)])
        return newest

    def set_aside(self, *, after: int) -> Path | None:
        """Move the checkpoints of later steps than `after`, damaged ones too, into a folder `abandoned_N` next to them.

        A run that goes back to an earlier step will write these steps again. Checkpoints in `abandoned_N` are never
        resumed from by default and never pruned.

        Returns:
            The folder they were moved to; None if there are no later checkpoints.
        """
        later = [step for step in self.named_steps() if step > after]
        if not later:
            return None
        number = 1
        while (target := self.folder / f"{ABANDONED}{number}").exists():
            number += 1
        target.mkdir()
        # The newest first: a kill in between leaves no checkpoint that looks newer than one already moved.
        for step in reversed(later):
            os.replace(self.find(step), target / self.path(step).name)
        sync(target)
        sync(self.folder)
        return target

    def _replace(self, complete: Path, final: Path) -> None:
        """Give `complete` the name `final`; at every moment one of the two exists and is complete."""
        old = final.with_name(f"{final.name}.old{_PARTIAL}")
        _delete(old)
        if final.exists():
            os.replace(final, old)
        os.replace(complete, final)
        sync(self.folder)
        _delete(old)

    def _discard(self, folder: Path) -> None:
        """Delete a checkpoint: it is renamed before its files are deleted."""
        partial = folder.with_name(f"{folder.name}.old{_PARTIAL}")
        _delete(partial)
        os.replace(folder, partial)
        _delete(partial)

    def _prune(self, *, just_written: int) -> None:
        steps = self.steps()
        best = self._best(steps)
        keep = {just_written, *steps[-self._retention.keep_latest_k :], *(steps if best is None else best)}
        for step in steps:
            if step not in keep:
                self._discard(self.find(step))

    def _best(self, steps: list[int]) -> list[int] | None:
        """The best by the metric; None if none of them has it yet, so that any of them may be the best one."""
        name, top = self._retention.metric_name, self._retention.keep_top_k
        if name is None or top is None:
            return []
        sign = 1.0 if self._retention.higher_is_better else -1.0
        scores = {step: _metric(self.find(step), name) for step in steps}
        scored = [step for step in steps if scores[step] is not None]
        due = [step for step in steps if step % self._retention.save_period == 0]
        if len(due) > 1 and not scored and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "none of the checkpoints of steps %s has the metric %s (checkpointing.metric_name), so all checkpoints are "
                "kept until one has it. Check its name in metrics.jsonl. Metrics of validation exist only at steps with "
                "validation: set val_period so that it divides checkpointing.save_period.",
                ", ".join(map(str, due)),
                name,
            )
        if not scored:
            return None
        return sorted(scored, key=lambda step: (sign * scores[step], step))[-top:]


def step_of(checkpoint: Path) -> int:
    """The step of a step folder."""
    return int(checkpoint.stem.removeprefix("step_"))


def _metric(checkpoint: Path, name: str) -> Any:
    try:
        return read_manifest(checkpoint)["metrics"].get(name)
    except CheckpointError as error:  # damage of an older checkpoint must not stop the run
        _log.warning("%s It is ranked as if it had no %s.", error, name)
        return None


def _delete(folder: Path) -> None:
    """Delete a folder with its files if it exists; of a symbolic link, only the link."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """Identity of a run, which is unchanged when the run is resumed or its folders are moved."""

    run_id: str
    """32 hexadecimal digits, generated when the run folder is created."""
    name: str
    """The run's name in its config, without the number of the run folder."""
    folder: str
    """Absolute path of the run folder."""

    @classmethod
    def new(cls, *, name: str, folder: Path) -> RunIdentity:
        """The identity of a run that starts now."""
        return cls(run_id=uuid.uuid4().hex, name=name, folder=str(folder.absolute()))


def read_identity(folder: Path) -> RunIdentity | None:
    """The run that a run folder or checkpoint folder belongs to; None if it has no run.json.

    Raises:
        CheckpointError: its run.json is damaged.
    """
    path = folder / RUN
    try:
        return RunIdentity(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}), so the run that {folder} belongs to is unknown. Restore the file, or delete it "
            "if the folder belongs to this run."
        ) from error


def write_identity(folder: Path, identity: RunIdentity) -> None:
    """Write run.json into `folder`; the file is complete or absent."""
    write_atomically(folder / RUN, json.dumps(asdict(identity), indent=1).encode())


def lock_folder(folder: Path, exits: ExitStack, *, setting: str) -> None:
    """Create `folder` and lock it for this process until `exits` closes or the process ends.

    Args:
        folder: a run folder or a checkpoint folder.
        exits: releases the lock.
        setting: the config key of the folder, for errors.

    Raises:
        UserError: another process has locked it, or it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Append mode keeps the owner's entry if locking fails.
        lock: IO[str] = (folder / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"Cannot create the folder {folder}: {error.strerror}. Choose another one with {setting}=FOLDER."
        ) from error
    exits.callback(lock.close)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        raise UserError(
            f"{folder} is in use by {lock.read().strip() or 'another process'}. Wait until that run has ended, or choose "
            f"another folder with {setting}=FOLDER."
        ) from error
    except OSError as error:
        _log.warning(
            "%s is on a file system without file locks (%s): nothing prevents a second run from writing there at the same time",
            folder,
            error.strerror,
        )
        return
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on host {socket.gethostname()}\n")
    lock.flush()


def is_locked(folder: Path) -> bool:
    """Whether a process has locked a folder."""
    try:
        with (folder / LOCK).open(encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or no locks
        return False
    return False


def refuse_foreign(store: CheckpointStore, identity: RunIdentity, *, continues: bool) -> None:
    """Reject a checkpoint folder with checkpoints of another run. Without any, its run ended before its first checkpoint.

    Args:
        store: the folder this run would write to.
        identity: identity of this run.
        continues: whether the run resumes from one of its checkpoints; then a folder without run.json is taken over.

    Raises:
        CheckpointError: it belongs to another run, or has checkpoints of an unknown one.
    """
    owner, steps = read_identity(store.folder), store.named_steps()
    if not steps or (owner is None and continues):
        return
    if owner is not None and owner.run_id == identity.run_id:
        return
    which = f"the run {owner.folder}" if owner is not None else "an unknown run (it has no run.json)"
    raise CheckpointError(
        f"The checkpoint folder {store.folder} belongs to {which} (steps {steps[0]} to {steps[-1]}). Two runs in one folder "
        "would delete and resume each other's checkpoints. Choose another one with checkpointing.checkpoint_dir=FOLDER, or "
        f"remove that key to use the run folder. To continue that run, use --resume {store.find(steps[-1])}."
    )


@dataclass
class TimeLimit:
    """Ends a run in time, assuming the longest step and the longest checkpoint so far.

    Until the first checkpoint, saving one is assumed to take as long as a step.
    """

    seconds: float
    """Time limit from `started`."""
    started: float
    """When it started, on the clock of the other methods' `now`."""
    _longest_step: float = field(default=0.0, init=False)
    _longest_save: float | None = field(default=None, init=False)

    def count_step(self, seconds: float) -> None:
        """Record the duration of a step, including validation."""
        self._longest_step = max(self._longest_step, seconds)

    def count_save(self, seconds: float) -> None:
        """Record the duration of a checkpoint."""
        self._longest_save = max(self._longest_save or 0.0, seconds)

    def allows_step(self, now: float) -> bool:
        """Whether another step and its checkpoint are expected to end within the limit."""
        save = self._longest_step if self._longest_save is None else self._longest_save
        return now - self.started + self._longest_step + save <= self.seconds
