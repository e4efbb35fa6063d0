"""The manifest of a checkpoint: its step, its metrics, and the size and digest of every file in it.

The digest is xxh3_128: it detects damage (a flipped bit, a truncated file), not tampering. It reads 5.5 GiB per CPU-second;
SHA-256 reads 0.9 and BLAKE2b 0.4 (benchmarks/checkpoint_digests.py). The manifest also has a digest of itself.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
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
