"""Finds damaged files of a checkpoint before anything is loaded from it, and the next older checkpoint without damage."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rl_core.errors import CheckpointError
from rl_train.checkpoints.manifest import MANIFEST, DamagedFileError, digests_of, files_in, read_json_object, read_manifest

STATE: Final = "state.json"
STEP_FOLDER: Final = re.compile(r"^step_(\d{6,})(?:\.complete)?$")
_STATE_FORM: Final[Mapping[str, type]] = {"step": int, "resumable": bool, "parts": dict, "config": dict}
_MAX_LISTED: Final = 6


def verify_checkpoint(checkpoint: Path, *, only: Collection[str] | None = None) -> None:
    """Compare the files of a checkpoint with its manifest: which there are, their sizes and their digests.

    Reads every compared file once, at several GiB per second and core if the disk is that fast.

    Args:
        checkpoint: the step folder.
        only: folders such as `policy/weights`, for a caller that loads nothing else; `state.json` is always compared. All
            by default.

    Raises:
        CheckpointError: files are missing, were added or have changed; lists them and the next older intact checkpoint.
    """
    problems = find_damage(checkpoint, only=only)
    if problems:
        raise damage_error(checkpoint, problems)


def find_damage(checkpoint: Path, *, only: Collection[str] | None = None) -> list[str]:
    """One line for each damaged file, as `verify_checkpoint`; empty for a checkpoint without damage.

    Raises:
        CheckpointError: it is not a complete checkpoint.
    """
    try:
        manifest = read_manifest(checkpoint)
    except DamagedFileError as error:
        return [error.problem]
    problems = list(_contradictions(checkpoint, manifest))
    if not problems:
        problems = list(_changed_files(checkpoint, manifest["files"], only))
    return problems


def read_state(checkpoint: Path) -> dict[str, Any]:
    """`state.json` of a complete checkpoint, in the form that `Checkpoints` writes.

    Raises:
        CheckpointError: it is not a complete checkpoint, or `state.json` is damaged or contradicts the manifest.
    """
    problems: list[str] = []
    try:
        problems += _contradictions(checkpoint, read_manifest(checkpoint))
        if not problems:
            return read_json_object(checkpoint / STATE)
    except DamagedFileError as error:
        problems.append(error.problem)
    raise damage_error(checkpoint, problems)


def without_manifest(checkpoint: Path) -> str:
    """What is in the place of a checkpoint that has no manifest, in one line."""
    if checkpoint.is_dir():
        entries = sorted(entry.name for entry in checkpoint.iterdir())
        if MANIFEST in entries:
            return f"{MANIFEST}: not a file"
        return f"{MANIFEST}: missing; the folder contains: {', '.join(entries[:8]) or 'nothing'}"
    if checkpoint.is_symlink():
        return f"{checkpoint.name}: a symbolic link to {checkpoint.readlink()}, which is not a folder"
    return f"{checkpoint.name}: a file, not a folder"


def damage_error(checkpoint: Path, problems: Sequence[str]) -> CheckpointError:
    """The error for a checkpoint with these problems, one line each."""
    shown = [f"  {problem}" for problem in problems[:_MAX_LISTED]]
    if len(problems) > _MAX_LISTED:
        shown.append(f"  and {len(problems) - _MAX_LISTED} more")
    return CheckpointError(
        "\n".join([f"The checkpoint {checkpoint} is damaged, so nothing was loaded from it:", *shown, _advice(checkpoint)])
    )


def _advice(checkpoint: Path) -> str:
    older = next_older_checkpoint(checkpoint)
    if older is None:
        return (
            "No older checkpoint next to it is without damage. Restore the files from a copy, or start the run again with "
            "--resume never."
        )
    return (
        f"The next older checkpoint without damage is {older}. Continue from it with --resume {older}, or restore the files "
        "from a copy."
    )


def next_older_checkpoint(checkpoint: Path) -> Path | None:
    """The newest checkpoint of an earlier step in the same folder that has no damage; reads its files."""
    own = STEP_FOLDER.match(checkpoint.name)
    if own is None or not checkpoint.parent.is_dir():
        return None
    found = {int(match[1]): path for path in checkpoint.parent.iterdir() if (match := STEP_FOLDER.match(path.name))}
    for step in sorted((step for step in found if step < int(own[1])), reverse=True):
        try:
            if not find_damage(found[step]):
                return found[step]
        except CheckpointError:
            continue
    return None


def _contradictions(checkpoint: Path, manifest: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with `state.json`, and with the step that folder, manifest and state must agree on."""
    try:
        state = read_json_object(checkpoint / STATE)
    except DamagedFileError as error:
        yield error.problem
        return
    for key, kind in _STATE_FORM.items():
        if not isinstance(state.get(key), kind):
            yield f"{STATE}: `{key}` must be {kind.__name__}, found {type(state.get(key)).__name__}"
            return
    if state["step"] != manifest["step"]:
        yield f"{STATE}: its step is {state['step']}, but that of the manifest is {manifest['step']}"
    name = STEP_FOLDER.match(checkpoint.name)
    if name is not None and int(name[1]) != manifest["step"]:
        yield f"the folder name has step {int(name[1])}, but its manifest has step {manifest['step']}"


def _changed_files(checkpoint: Path, files: Mapping[str, Mapping[str, Any]], only: Collection[str] | None) -> Iterator[str]:
    def compared(name: str) -> bool:
        return only is None or name == STATE or name.startswith(tuple(f"{folder.rstrip('/')}/" for folder in only))

    wanted = {name: file for name, file in files.items() if compared(name)}
    present = {name for name in wanted if (checkpoint / name).is_file()}
    for name in sorted(wanted.keys() - present):
        yield f"{name}: missing" if not (checkpoint / name).exists() else f"{name}: not a file"
    same_size = []
    for name in sorted(present):
        size = (checkpoint / name).stat().st_size
        if size != wanted[name]["size"]:
            yield f"{name}: {size} bytes, {wanted[name]['size']} were written"
        else:
            same_size.append(name)
    try:
        digests = digests_of(checkpoint, same_size)
    except OSError as error:
        yield f"{Path(error.filename or checkpoint).name}: cannot be read: {error.strerror}"
        return
    for name, digest in digests.items():
        if digest != wanted[name]["digest"]:
            yield f"{name}: its content changed after it was written"
    # An additional file in a model folder can change what is loaded. Network file systems create `.nfs*` files.
    for name in sorted(files_in(checkpoint)):
        if "/" in name and compared(name) and name not in files and not Path(name).name.startswith(".nfs"):
            yield f"{name}: is not part of the checkpoint; remove it"
