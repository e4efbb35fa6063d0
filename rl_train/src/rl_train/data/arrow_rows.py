"""Parquet files and Hugging Face datasets as rows, loaded by the library `datasets` and left on disk; knows no field.

Loading is all that the library does here: the order, the resume, the bad rows and the splits that are held out are ours.
"""

from __future__ import annotations

import glob
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rl_core.errors import DataError
from rl_train.data.concat import ConcatDataset

_SAVED = ("state.json", "dataset_dict.json")
"""What `save_to_disk` leaves in a folder: of one split, of several."""


class ArrowRows:
    """The rows of tables, one table after the other.

    A key of a nested field that is null is left out: a table has a column for every key that any of its rows has, so that the
    arguments of one row's call would stand, as nulls, in the calls of all the others.

    Args:
        tables: Each with the name that places go by.
        name: What errors call the whole.
    """

    def __init__(self, tables: Sequence[tuple[str, Any]], *, name: str) -> None:
        self.name = name
        self._names = [table_name for table_name, _ in tables]
        self._tables = [_undecoded(table) for _, table in tables]
        self._nested = [_nested(table.features) for table in self._tables]
        self._rows = ConcatDataset(self._tables)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        table, row = self._rows.locate(index)
        fields: dict[str, Any] = self._tables[table][row]
        return {**fields, **{key: _without_nulls(fields[key], kind) for key, kind in self._nested[table].items()}}

    def place(self, index: int) -> str:
        """Table and row number, from 0, as `dataset[row]` counts."""
        table, row = self._rows.locate(index)
        return f"{self._names[table]}, row {row}"


def parquet_rows(path: Path) -> ArrowRows:
    """The rows of a parquet file, or of all `*.parquet` of a folder in the order of their names.

    Raises:
        DataError: There is no such file, or it is no parquet.
    """
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        what = "has no *.parquet" if path.is_dir() else "does not exist"
        raise DataError(f"dataset {path} {what}: give the path of a parquet file, or of a folder of them")
    return ArrowRows([(str(file), _loaded(partial(_parquet, file), str(file))) for file in files], name=str(path))


def hugging_face_rows(
    path: str, *, subset: str | None = None, split: str | None = None, revision: str | None = None
) -> ArrowRows:
    """The rows of one split of a dataset.

    Args:
        path: A folder that `save_to_disk` wrote, a folder of data files, or the name of a dataset of the hub.
        subset: One of the dataset's configurations.
        split: One of its splits, or a slice of one (`train[:1000]`) where the library loads data files; may be left out where
            there is only one.
        revision: Of a dataset of the hub: branch, tag or commit.

    Raises:
        DataError: There is no such dataset, subset, split or revision, or several splits and none is named; the hub cannot be
            reached, and the cache has no copy, or none of the revision.
    """
    datasets = _library()
    if Path(path).is_file():
        raise DataError(f"dataset {path} is a file: read it with `dataset_name: parquet` or `jsonl`, or give its folder")
    saved = any((Path(path) / name).is_file() for name in _SAVED)
    if saved and subset is not None:
        raise DataError(f"dataset {path} was written by save_to_disk and has no subsets: leave out `subset: {subset}`")
    if revision is not None and Path(path).is_dir():
        raise DataError(f"dataset {path} is a folder and has no revisions: leave out `revision: {revision}`")
    if not saved and Path(path).is_dir() and glob.has_magic(path):
        raise DataError(
            f"dataset {path} has one of * ? [ ] in its path, which the datasets library reads as a pattern, so it finds no "
            "files: rename the folder, or name its files with `dataset_name: parquet` or `jsonl`"
        )
    name = f"{path} ({subset})" if subset else path
    if saved:
        found = _loaded(lambda: datasets.load_from_disk(path), name)
    else:
        found = _loaded(lambda: datasets.load_dataset(path, subset, split=split, revision=revision), name)
        if revision is not None:
            _check_revision(found, path, revision, name)
    if isinstance(found, Mapping):
        split, found = _one_split(found, split, name)
    elif saved and split is not None:
        split = _the_split(found, split, name)
    return ArrowRows([(f"{name}[{split}]" if split else name, found)], name=name)


def _undecoded(table: Any) -> Any:
    """A table that leaves its pictures and sounds as they are: nothing reads them, and decoding needs packages and time."""
    json = _library().Json
    for name, kind in table.features.items():
        if hasattr(kind, "decode") and not isinstance(kind, json):
            table = table.cast_column(name, replace(kind, decode=False))
    return table


def _nested(features: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that have keys within, with what they hold."""
    return {key: kind for key, kind in features.items() if _has_keys(kind)}


def _has_keys(kind: Any) -> bool:
    return isinstance(kind, dict) or (_has_keys(kind.feature) if hasattr(kind, "feature") else False)


def _without_nulls(value: Any, kind: Any) -> Any:
    """A value without its null keys, as far as the table made them: a column of JSON holds what was written."""
    if isinstance(kind, dict) and isinstance(value, dict):
        return {key: _without_nulls(value[key], each) for key, each in kind.items() if value[key] is not None}
    if hasattr(kind, "feature") and isinstance(value, list):
        return [_without_nulls(each, kind.feature) for each in value]
    return value


def is_table(given: Any) -> bool:
    """Whether it is a dataset of the library, with rows by number."""
    datasets = sys.modules.get("datasets")  # who has not imported it has none
    return datasets is not None and isinstance(given, datasets.Dataset)


def is_split(given: Any) -> bool:
    """Whether it is several datasets of the library, by the names of their splits."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(given, datasets.DatasetDict)


def _parquet(file: Path) -> Any:
    datasets = _library()
    import pyarrow.parquet

    described = pyarrow.parquet.read_metadata(file)
    if described.num_rows == 0:  # the library has no word for a file without rows
        return datasets.Dataset(described.schema.to_arrow_schema().empty_table())
    # The library takes a pattern.
    return datasets.Dataset.from_parquet(glob.escape(str(file)))


def _one_split(found: Mapping[str, Any], split: str | None, name: str) -> tuple[str, Any]:
    if split is None and len(found) == 1:
        return next(iter(found.items()))
    if split is None:
        raise DataError(f"dataset {name} has the splits {', '.join(found)}: say which with `split`")
    if split not in found:
        raise DataError(f"dataset {name} has no split {split!r}: it has {', '.join(found)}")
    return split, found[split]


def _the_split(found: Any, split: str, name: str) -> str:
    """The asked split, where one table is all that was saved."""
    own = None if found.split is None else str(found.split)
    if own != split:
        its = "a single table without a name" if own is None else f"only {own!r}"
        raise DataError(f"dataset {name} has no split {split!r}: it is {its}. Leave out `split`.")
    return split


def _loaded(load: Callable[[], Any], name: str) -> Any:
    """What the library loads, with its progress bars off: nothing else that a run prints is lost among them."""
    datasets = _library()
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        found = load()
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        why, remedy = _why(error)
        raise DataError(f"dataset {name} cannot be loaded: {why}. {remedy}") from error
    finally:
        if shown:
            datasets.enable_progress_bars()
    # A format that was saved along (tensors, data frames) would change what a row is.
    return found.with_format(None)


def _why(error: Exception) -> tuple[str, str]:
    """What an error of the library says, and what to do about it."""
    datasets = _library()
    text = " ".join(str(error).partition("Example of usage")[0].split()).rstrip(".")
    if isinstance(error, datasets.exceptions.DatasetNotFoundError):
        if text.startswith("Revision"):
            return text, "Give a branch, a tag or a commit that it has"
        return (
            text,
            "Give the path of a folder that exists, or a name that the hub has; private ones need `hf auth login` before",
        )
    if isinstance(error, ConnectionError) and datasets.config.HF_HUB_OFFLINE:
        return text, (
            "HF_HUB_OFFLINE is set, and the cache has no copy of it: unset it, load it once where there is a network, or give "
            "the path of a folder"
        )
    if isinstance(error, ConnectionError):
        return text, "Look at the network and HF_ENDPOINT, or give the path of a folder"
    if "Config name is missing" in text or "BuilderConfig" in text:
        return text, "Say which with `subset`"
    why = error.__cause__ or error
    return f"{type(why).__name__}: {str(why).rstrip('.')}", (
        "Give what exists: a parquet file, a folder that save_to_disk wrote, a folder of data files, or the name of a dataset "
        "of the hub; lines of JSON are read with `dataset_name: jsonl`"
    )


def _check_revision(found: Any, path: str, revision: str, name: str) -> None:
    """Refuse a copy of another revision, which the library takes from its cache where it cannot reach the hub."""
    from huggingface_hub import constants

    reference = Path(constants.HF_HUB_CACHE) / f"datasets--{path.replace('/', '--')}" / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    tables = found.values() if isinstance(found, Mapping) else [found]
    files = [Path(file["filename"]) for table in tables for file in table.cache_files]
    if not all(commit in file.parts for file in files):
        raise DataError(
            f"dataset {name} cannot be loaded: the hub is not asked or not reached, and the copy in the cache "
            f"({files[0].parent}) is not known to be of the revision {revision}. Load it once where there is a network, or "
            "leave out `revision`"
        )


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"reading it needs a package that is not here ({error}): pip install 'rl-train[data]'") from error
    return datasets
