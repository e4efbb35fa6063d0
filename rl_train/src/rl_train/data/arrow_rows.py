"""Rows of Parquet files and Hugging Face datasets, memory-mapped by the `datasets` library.

The library only loads the data: order, resuming, bad rows and held-out splits are handled elsewhere in this package.
"""

from __future__ import annotations

import glob
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from rl_core.errors import DataError
from rl_train.data.holdout import Subset, row_location
from rl_train.data.rows import JsonLines

_SAVED = ("state.json", "dataset_dict.json")
"""Files that `save_to_disk` writes: for one split, for several splits."""


class ArrowRows:
    """The rows of tables, one table after the other.

    Null keys of nested fields are removed: a table has a column for every key of any row, so the tool call arguments of one
    row would appear, as nulls, in the calls of all others.

    Args:
        tables: Each with its name for row locations.
        name: Name of the data in error messages.
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

    def row_location(self, index: int) -> str:
        """Table and row number, from 0, as `dataset[row]` counts."""
        table, row = self._rows.locate(index)
        return f"{self._names[table]}, row {row}"


def parquet_rows(path: Path) -> ArrowRows:
    """The rows of a Parquet file, or of all `*.parquet` files of a folder in alphabetical order.

    Raises:
        DataError: The file does not exist or is not a Parquet file.
    """
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        what = "has no *.parquet" if path.is_dir() else "does not exist"
        raise DataError(f"dataset {path} {what}: give the path of a parquet file, or of a folder of them")
    return ArrowRows([(str(file), _loaded(partial(_parquet, file), str(file))) for file in files], name=str(path))


class JsonFileRows:
    """Rows of the JSON files of a folder, with the values of the files; fields that a row lacks are None, as in a table.

    Args:
        rows: The rows of the files.
        fields: The names of all fields.
        name: Name of the data in error messages.
    """

    def __init__(self, rows: Sequence[Any], fields: Iterable[str], *, name: str) -> None:
        self.name = name
        self._rows = rows
        self._empty = dict.fromkeys(fields)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self._empty, **self._rows[index]}

    def row_location(self, index: int) -> str:
        """File and line of a row."""
        return row_location(self._rows, index)


def hugging_face_rows(
    path: str, *, subset: str | None = None, split: str | None = None, revision: str | None = None
) -> ArrowRows | JsonFileRows:
    """The rows of one split of a dataset.

    Args:
        path: A folder that `save_to_disk` wrote, a folder of data files, or the name of a dataset on the hub.
        subset: One of the dataset's configurations.
        split: One of its splits, or a slice of one (`train[:1000]`) if the library loads data files; optional if there is
            only one.
        revision: Branch, tag or commit of a dataset on the hub.

    Raises:
        DataError: The dataset, subset, split or revision does not exist, there are several splits and none is named, or the hub
            cannot be reached and the cache has no copy of the revision.
    """
    datasets = _library()
    if Path(path).is_file():
        raise DataError(f"dataset {path} is a file: read it with `dataset_name: parquet` or `jsonl`, or give its folder")
    saved = any((Path(path) / name).is_file() for name in _SAVED)
    if saved and subset is not None:
        raise DataError(f"dataset {path} was written by save_to_disk and has no subsets: remove `subset: {subset}`")
    if revision is not None and Path(path).is_dir():
        raise DataError(f"dataset {path} is a folder and has no revisions: remove `revision: {revision}`")
    if not saved and Path(path).is_dir() and glob.has_magic(path):
        raise DataError(
            f"the path of dataset {path} contains one of * ? [ ], which the datasets library reads as a pattern, so it finds "
            "no files: rename the folder, or read its files with `dataset_name: parquet` or `jsonl`"
        )
    name = f"{path} ({subset})" if subset else path
    if saved:
        found = _loaded(lambda: datasets.load_from_disk(path), name)
    else:
        load = partial(datasets.load_dataset, path, subset, split=split, revision=revision)
        found = _loaded(load, name)
        if Path(path).is_dir():
            return _rows_of_folder(load, found, path, subset=subset, split=split, name=name)
        _check_revision(found, path, revision, name)
    if isinstance(found, Mapping):
        split, found = _one_split(found, split, name)
    elif saved and split is not None:
        split = _the_split(found, split, name)
    return ArrowRows([(f"{name}[{split}]" if split else name, found)], name=name)


def _rows_of_folder(
    load: Callable[..., Any], found: Any, path: str, *, subset: str | None, split: str | None, name: str
) -> ArrowRows | JsonFileRows:
    """The rows of data files of a folder, with the values of the files; `found` is what the library has loaded."""
    table = next(iter(found.values())) if isinstance(found, Mapping) else found
    if table.info.builder_name == "json" and any(map(_may_change, table.features.values())):
        return _values_of_files(path, subset, table.info, split or _one_split(found, split, name)[0], name)
    if table.info.builder_name == "csv":
        found = _texts(load, table, name)
    if isinstance(found, Mapping):
        split, found = _one_split(found, split, name)
    return ArrowRows([(f"{name}[{split}]", found)], name=name)


def _values_of_files(path: str, subset: str | None, info: Any, split: str, name: str) -> JsonFileRows:
    """The rows of JSON files of a folder, which the library may have changed.

    It turns texts into dates, and integers into floats if their column has others. If a column has values of several types, it
    turns texts such as "7" or "true" into these values, and rounds numbers of all columns to 10 decimal places.

    Args:
        path: The folder.
        subset: One of its configurations.
        info: What the library found, with the fields and the number of rows of each split.
        split: A split, or a slice of one.
        name: Name of the data in error messages.

    Raises:
        DataError: The files cannot be read as JSON, or have other rows than the library found.
    """
    datasets = _library()
    files = datasets.load_dataset_builder(path, subset).config.data_files
    sizes = {each: known.num_examples for each, known in info.splits.items()}
    chosen = []
    for part in datasets.ReadInstruction.from_spec(split).to_absolute(sizes):
        parts: list[Any] = [JsonLines(Path(file), arrays=True) for file in files[part.splitname]]
        rows = ConcatDataset(parts)
        if len(rows) != sizes[part.splitname]:
            raise DataError(
                f"dataset {name} cannot be read: the library would change its values, and its files do not have one JSON "
                "object per line. Write them so (jq -c . converts them)"
            )
        chosen.append(Subset(rows, range(part.from_, part.to)))
    return JsonFileRows(ConcatDataset(chosen), info.features, name=f"{name}[{split}]")


def _texts(load: Callable[..., Any], table: Any, name: str) -> Any:
    """Load CSV files of a folder again, with texts instead of numbers and dates."""
    text = _library().Features(dict.fromkeys(table.features, _library().Value("string")))
    return _loaded(partial(load, features=text, keep_default_na=False, na_values=[""]), name)


def _may_change(kind: Any) -> bool:
    """Whether values of a column of this type may differ from those of the JSON file."""
    if isinstance(kind, dict):
        return any(map(_may_change, kind.values()))
    if hasattr(kind, "feature"):
        return _may_change(kind.feature)
    return isinstance(kind, _library().Json) or str(getattr(kind, "dtype", "")).startswith(
        ("float", "timestamp", "date", "time", "duration")
    )


def _undecoded(table: Any) -> Any:
    """A table that does not decode images and audio: audio is not used, and images are decoded when their row is tokenized."""
    for name, kind in table.features.items():
        if (file := _as_file(kind)) != kind:
            table = table.cast_column(name, file)
    return table


def _as_file(kind: Any) -> Any:
    """The type of a column whose images and audio, also nested ones, are their files."""
    if isinstance(kind, dict):
        return {key: _as_file(each) for key, each in kind.items()}
    if hasattr(kind, "decode") and not isinstance(kind, _library().Json):
        return replace(kind, decode=False)
    return replace(kind, feature=_as_file(kind.feature)) if hasattr(kind, "feature") else kind


def _nested(features: Mapping[str, Any]) -> dict[str, Any]:
    """The columns with nested keys, and their types."""
    return {key: kind for key, kind in features.items() if _has_keys(kind)}


def _has_keys(kind: Any) -> bool:
    return isinstance(kind, dict) or (_has_keys(kind.feature) if hasattr(kind, "feature") else False)


def _without_nulls(value: Any, kind: Any) -> Any:
    """A value without the null keys that the table added; JSON columns are unchanged."""
    if isinstance(kind, dict) and isinstance(value, dict):
        return {key: _without_nulls(value[key], each) for key, each in kind.items() if value[key] is not None}
    if hasattr(kind, "feature") and isinstance(value, list):
        return [_without_nulls(each, kind.feature) for each in value]
    return value


def is_table(given: Any) -> bool:
    """Whether this is a `datasets.Dataset`."""
    datasets = sys.modules.get("datasets")  # if it is not imported, no such object exists
    return datasets is not None and isinstance(given, datasets.Dataset)


def is_dataset_dict(given: Any) -> bool:
    """Whether this is a `datasets.DatasetDict`, which has several splits."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(given, datasets.DatasetDict)


def _parquet(file: Path) -> Any:
    datasets = _library()
    import pyarrow.parquet

    described = pyarrow.parquet.read_metadata(file)
    if described.num_rows == 0:  # the library cannot read a file without rows
        return datasets.Dataset(described.schema.to_arrow_schema().empty_table())
    # The library expects a pattern.
    return datasets.Dataset.from_parquet(glob.escape(str(file)))


def _one_split(found: Mapping[str, Any], split: str | None, name: str) -> tuple[str, Any]:
    if split is None and len(found) == 1:
        return next(iter(found.items()))
    if split is None:
        raise DataError(f"dataset {name} has the splits {', '.join(found)}: choose one with `split`")
    if split not in found:
        raise DataError(f"dataset {name} has no split {split!r}: it has {', '.join(found)}")
    return split, found[split]


def _the_split(found: Any, split: str, name: str) -> str:
    """The requested split of a single saved table."""
    own = None if found.split is None else str(found.split)
    if own != split:
        its = "a single table without a name" if own is None else f"only {own!r}"
        raise DataError(f"dataset {name} has no split {split!r}: it is {its}. Remove `split`.")
    return split


def _loaded(load: Callable[[], Any], name: str) -> Any:
    """Load with the library, without its progress bars."""
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
    # A saved format (tensors, data frames) would change the type of the rows.
    return found.with_format(None)


def _why(error: Exception) -> tuple[str, str]:
    """The message of an error of the library, and what to do about it."""
    datasets = _library()
    text = " ".join(str(error).partition("Example of usage")[0].split()).rstrip(".")
    if isinstance(error, datasets.exceptions.DatasetNotFoundError):
        if text.startswith("Revision"):
            return text, "Give a branch, a tag or a commit that it has"
        return (
            text,
            "Give the path of an existing folder, or a name that exists on the hub; private datasets need `hf auth login`",
        )
    if isinstance(error, ConnectionError) and datasets.config.HF_HUB_OFFLINE:
        return text, (
            "HF_HUB_OFFLINE is set, and the cache has no copy of it: unset it, load it once with a network connection, or give "
            "the path of a folder"
        )
    if isinstance(error, ConnectionError):
        return text, "Check the network and HF_ENDPOINT, or give the path of a folder"
    if "Config name is missing" in text or "BuilderConfig" in text:
        return text, "Choose one with `subset`"
    why = error.__cause__ or error
    if "Value is too big" in str(why):
        return "it has an integer of more than 64 bits", "Write it as text, or read the file with `dataset_name: jsonl`"
    if "corresponds to no data" in text or type(why).__name__ == "EmptyDataError":
        return "it has no rows", "A dataset needs at least one row"
    return f"{type(why).__name__}: {str(why).rstrip('.')}", (
        "Give an existing Parquet file, a folder that save_to_disk wrote, a folder of data files, or the name of a dataset on "
        "the hub; read JSON lines with `dataset_name: jsonl`"
    )


def _check_revision(found: Any, path: str, revision: str | None, name: str) -> None:
    """Reject a cached copy of another revision, which the library uses if it cannot reach the hub."""
    if revision is None:
        return
    from huggingface_hub import constants

    reference = Path(constants.HF_HUB_CACHE) / f"datasets--{path.replace('/', '--')}" / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    tables = found.values() if isinstance(found, Mapping) else [found]
    files = [Path(file["filename"]) for table in tables for file in table.cache_files]
    if not all(commit in file.parts for file in files):
        raise DataError(
            f"dataset {name} cannot be loaded: the hub is offline or unreachable, and the cached copy ({files[0].parent}) "
            f"may not be of the revision {revision}. Load it once with a network connection, or remove `revision`"
        )


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"reading it needs a package that is not installed ({error}): pip install 'rl-train[data]'") from error
    return datasets


class ConcatDataset(Sequence[Any]):
    """Several map-style collections, concatenated.

    Args:
        parts: The collections.
    """

    def __init__(self, parts: Sequence[Sequence[Any]]) -> None:
        self.parts = parts
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: Any) -> Any:
        number, row = self.locate(index)
        return self.parts[number][row]

    def row_location(self, index: int) -> str:
        """Location of the row of a record."""
        number, row = self.locate(index)
        return row_location(self.parts[number], row)

    def locate(self, index: int) -> tuple[int, int]:
        """The number of the collection, and the index in it."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._ends, index)
        return number, index - (self._ends[number - 1] if number else 0)
