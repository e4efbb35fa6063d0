"""The manifest of a checkpoint: its step, its metrics, and the size and digest of every file in it.

Files are compared with it before anything is loaded from them. The digest is xxh3_128: it detects damage (a flipped bit, a
truncated file), not tampering. It reads 5.5 GiB per CPU-second; SHA-256 reads 0.9 and BLAKE2b 0.4
(benchmarks/checkpoint_digests.py). The manifest also has a digest of itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import xxhash

from rl_core.errors import CheckpointError

MANIFEST: Final = "manifest.json"
ALGORITHM: Final = "xxh3_128"
_FORMAT: Final = 2
_FORMAT_1_KEYS: Final = {"step", "metrics"}
"""Format 1 had neither a format number nor digests."""
_MAX_THREADS: Final = 8
STATE: Final = "state.json"
STEP_FOLDER: Final = re.compile(r"^step_(\d{6,})(?:\.complete)?$")
_STATE_FORM: Final[Mapping[str, type]] = {"step": int, "resumable": bool, "parts": dict, "config": dict}
_MAX_LISTED: Final = 6


class DamagedFileError(CheckpointError):
    """A JSON file of a checkpoint is corrupt.

    Args:
        path: the file.
        problem: the problem.

    Attributes:
        problem: the same, prefixed with the file name.
    """

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"The checkpoint {path.parent} is damaged: {path.name}: {problem}.")
        self.problem = f"{path.name}: {problem}"


def write_manifest(folder: Path, *, step: int, metrics: Mapping[str, float]) -> None:
    """Write the manifest of all files in `folder`; call it last.

    Args:
        folder: all other files of the checkpoint, closed.
        step: steps done.
        metrics: finite numbers by name.
    """
    names = sorted(files_in(folder))
    digests = digests_of(folder, names)
    files = {name: {"size": (folder / name).stat().st_size, "digest": digests[name]} for name in names}
    content = {"format": _FORMAT, "step": step, "metrics": dict(metrics), "algorithm": ALGORITHM, "files": files}
    text = json.dumps({**content, "digest": _own_digest(content)}, indent=1)
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """`step`, `metrics` and `files`: path in the checkpoint to `size` and `digest`.

    Raises:
        DamagedFileError: it is corrupt.
        CheckpointError: the folder is not a complete checkpoint, or it has another format.
    """
    if not (checkpoint / MANIFEST).is_file():
        raise CheckpointError(_no_manifest(checkpoint))
    manifest = read_json_object(checkpoint / MANIFEST)
    if manifest.keys() == _FORMAT_1_KEYS:
        raise _wrong_format(checkpoint, 1)
    expected = manifest.pop("digest", None)
    if expected != _own_digest(manifest):
        raise DamagedFileError(checkpoint / MANIFEST, "its content changed after it was written")
    if manifest.get("format") != _FORMAT:
        raise _wrong_format(checkpoint, manifest.get("format"))
    if not isinstance(manifest["step"], int) or not isinstance(manifest["metrics"], dict):
        raise DamagedFileError(checkpoint / MANIFEST, "`step` must be a whole number and `metrics` an object")
    return manifest


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint.

    Raises:
        DamagedFileError: it is not a JSON object, or cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DamagedFileError(path, "missing") from error
    except OSError as error:
        raise DamagedFileError(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(path, f"invalid JSON: {error}") from error
    if not isinstance(content, dict):
        raise DamagedFileError(path, f"must be a JSON object, found {type(content).__name__}")
    return content


def files_in(folder: Path) -> Iterator[str]:
    """Paths of all files below `folder`, relative to it, with `/`; without the manifest."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = (Path(parent) / name).relative_to(folder).as_posix()
            if path != MANIFEST:
                yield path


def digests_of(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Digests of files below `folder`, by name.

    Raises:
        OSError: a file cannot be read.
    """
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        return dict(zip(names, threads.map(lambda name: _digest(folder / name), names), strict=True))


def _digest(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _own_digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return str(xxhash.xxh3_128(text.encode()).hexdigest())


def _wrong_format(checkpoint: Path, found: Any) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint} has format {found}, but this version of rl-train reads format {_FORMAT}. Resume the run with the "
        "version that wrote it, or start a new run with --resume never."
    )


def _no_manifest(checkpoint: Path) -> str:
    steps = sorted(checkpoint.glob("checkpoints/step_*"))
    if not checkpoint.is_dir():
        return f"The checkpoint {checkpoint} does not exist. Give a folder such as runs/NAME/checkpoints/step_000010."
    there = sorted(entry.name for entry in checkpoint.iterdir())[:8]
    return f"{checkpoint} is not a checkpoint: it has no {MANIFEST} (it contains: {', '.join(there) or 'nothing'})." + (
        f" It is a run folder: use {steps[-1]}." if steps else " Give a folder such as runs/NAME/checkpoints/step_000010."
    )


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
