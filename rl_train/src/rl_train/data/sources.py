"""Opens the rows of a dataset's config, from any source."""

from __future__ import annotations

from rl_train.data.arrow_rows import hugging_face_rows, parquet_rows
from rl_train.data.json_lines import JsonLines
from rl_train.data.records import Rows
from rl_train.data.row_sections import HuggingFaceSource, JsonLinesSource, ParquetSource, RowsConfig


def open_rows(config: RowsConfig) -> Rows:
    """The rows of a config's source.

    Raises:
        DataError: The path of the config has no data.
    """
    match config:
        case JsonLinesSource():
            return JsonLines(config.path)
        case ParquetSource():
            return parquet_rows(config.path)
        case HuggingFaceSource():
            return hugging_face_rows(config.path, subset=config.subset, split=config.split, revision=config.revision)
    raise TypeError(f"{type(config).__name__} is not a source of rows: derive it from a source in dataset_config")
