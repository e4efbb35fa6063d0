"""Creates datasets from their classes, which may be a user's, and checks the first record."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rl_core.config.schema import DatasetConfig
from rl_core.errors import ConfigError, DataError, format_value
from rl_train.user_code import reporting_errors

_FORM = "A record is a dict with `messages` (a list of {role, content}), or with `prompt`, `chosen` and `rejected`."


def make_dataset(dataset_class: Any, section: DatasetConfig) -> Any:
    """The dataset of a section.

    Args:
        dataset_class: its class, called with the section.
        section: the section.

    Raises:
        ConfigError: the class is not a dataset, it raised, or its first record has another form.
        DataError: the data cannot be read.
    """
    name = section.dataset_name
    missing = [method for method in ("__len__", "__getitem__") if not hasattr(dataset_class, method)]
    if missing:
        raise ConfigError(
            f"{name} is not a dataset: it has no {' and no '.join(missing)}. Derive a class from "
            "rl_core.interfaces.dataset.Dataset."
        )
    with reporting_errors(f"The dataset {name}", dataset_class):
        made = dataset_class(section)
        size = len(made)
    if not size:
        raise ConfigError(f"The dataset {name} is empty: its length is 0.")
    with suppress(DataError):  # a bad row, which is reported or skipped later
        record = record_of(made, 0, name=name)
        is_known = "messages" in record or {"prompt", "chosen", "rejected"} <= record.keys()
        if section.processor is None and not is_known:
            raise ConfigError(f"Record 0 of the dataset {name} has {sorted(record)}. {_FORM}")
    return made


def record_of(dataset: Any, index: Any, *, name: str) -> Mapping[str, Any]:
    """A record of a dataset; `name` names the dataset in errors.

    Raises:
        ConfigError: its class raised, or returned something else.
        DataError: the row is bad.
    """
    label = f"Record {index} of the dataset {name}"
    with reporting_errors(f"{label}: `__getitem__`", type(dataset)):
        record = dataset[index]
    if not isinstance(record, Mapping):
        raise ConfigError(f"{label} is {format_value(record)}. {_FORM}")
    return record
