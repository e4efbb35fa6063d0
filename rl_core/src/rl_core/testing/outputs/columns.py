"""Checks that a batch from a component has the promised columns, with their dtypes, axes and number of rows."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from rl_core.data.schema import SCHEMA
from rl_core.errors import BrokenPromiseError
from rl_core.plugins.manager import installed_plugins

SCORE_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "get_logprobs": ("logprobs",),
    "get_reference_policy_logprobs": ("reference_logprobs",),
    "get_topk_logprobs": ("topk_token_ids", "topk_logprobs"),
    "get_values": ("values",),
}
"""The columns that each scoring method of a model returns."""


def class_label(component_class: type) -> str:
    """A class and where it comes from, for errors: 'acme.engine.Engine (acme-rl 2.1)', or its file without a distribution."""
    name = f"{component_class.__module__}.{component_class.__qualname__}"
    package = component_class.__module__.partition(".")[0]
    for plugin, entry_point, _ in installed_plugins():
        if entry_point.module.partition(".")[0] == package:
            return f"{name} ({plugin.label})"
    for distribution in importlib.metadata.packages_distributions().get(package, ()):
        return f"{name} ({distribution} {importlib.metadata.version(distribution)})"
    file = getattr(sys.modules.get(component_class.__module__), "__file__", None)
    return f"{name} ({file or 'no distribution'})"


def broken_promise(component: object, method: str, problem: str) -> BrokenPromiseError:
    """The error for a component that returned something wrong; names its class, its workers' class and their distributions.

    Args:
        component: an instance; `worker_class` of a facade is what the author of a backend wrote.
        method: the method that returned it.
        problem: continues "Class.method"; ends with a full stop.
    """
    classes = [type(component), *filter(None, [getattr(component, "worker_class", None)])]
    origin = ", with the workers ".join(map(class_label, classes))
    return BrokenPromiseError(f"{type(component).__name__}.{method} {problem} The class is {origin}.")


def check_columns(batch: Any, keys: Iterable[str], *, rows: int, component: object, method: str) -> None:
    """Check the tensors of a batch against `rl_core.data.schema`; further columns are ignored.

    Args:
        batch: what a component returned.
        keys: the tensors that it must have.
        rows: B, the number of rows of the call.
        component: see `broken_promise`.
        method: the method that returned the batch.

    Raises:
        BrokenPromiseError: it is not a batch, or a column is missing, on a device, or of another dtype, number of axes or rows.
    """
    problem = None if isinstance(batch, Mapping) else f"returned {type(batch).__name__} instead of a BatchedDataDict."
    for key in keys if problem is None else ():
        problem = problem or _column_problem(batch, key, rows)
    if problem is not None:
        raise broken_promise(component, method, problem)


def _column_problem(batch: Mapping[str, Any], key: str, rows: int) -> str | None:
    spec = SCHEMA[key]
    if key not in batch:
        return f"returned no column `{key}`: it returned {', '.join(sorted(map(str, batch))) or 'an empty batch'}."
    column = batch[key]
    if not isinstance(column, torch.Tensor):
        return f"returned `{key}` as {type(column).__name__}. It must be a tensor {spec.shape} {spec.dtype}."
    if column.dtype is not getattr(torch, spec.dtype) or column.ndim != spec.ndim or column.device.type != "cpu":
        kind = f"{list(column.shape)} {str(column.dtype).removeprefix('torch.')} on {column.device.type}"
        return f"returned `{key}` as a tensor {kind}. It must be {spec.shape} {spec.dtype} on cpu."
    return None if len(column) == rows else f"returned {len(column)} rows of `{key}` for a call with {rows} rows."
