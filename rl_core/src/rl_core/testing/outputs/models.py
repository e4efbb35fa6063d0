"""Checks what engines and models return, once per call. Every error names the class, its distribution and the row.

A component's own word proves nothing: a row in the wrong place, a probability instead of its logarithm or a missing column
would otherwise be trained on, or fail much later with an error about another component.
"""

from __future__ import annotations

import importlib.metadata
import math
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rl_core.config.policy_sections import GenerationConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.generation_io import PROMPT_LOGPROBS, SETS, SampledSets, joined_sets, kept_tokens, with_input_lengths
from rl_core.data.schema import SCHEMA
from rl_core.errors import BrokenPromiseError
from rl_core.interfaces.generation import GenerationInterface, GenerationOutputSpec
from rl_core.interfaces.policy import LossFunction
from rl_core.plugins.manager import installed_plugins

_GENERATED = tuple(
    GenerationOutputSpec.__annotations__.keys()
    - {"failures", "messages", "token_versions", "top_logprobs", "prompt_logprobs", "sampled_sets", "unfinished"}
)
_ROW_KEYS = ("output_ids", "logprobs", "generation_lengths", "unpadded_sequence_lengths", "truncated", "weight_version")
assert {*_ROW_KEYS} == {*_GENERATED}
_ROW_LAYOUT = [(getattr(torch, SCHEMA[key].dtype), SCHEMA[key].ndim, True) for key in _ROW_KEYS]
"""Dtype of each column, its number of axes, and whether it is in CPU memory."""
_row_columns = operator.itemgetter(*_ROW_KEYS)
_SHORT_ROW = 512
"""Width up to which a row is returned as Python numbers."""
_NO_LIMIT = torch.iinfo(torch.int64).max
_LARGEST_LOGPROB = 0.1
"""Nats; log-probabilities are at most 0, up to the rounding of an engine that computes in bfloat16."""


def generated(generation: GenerationInterface, data: BatchedDataDict[Any], *, greedy: bool) -> BatchedDataDict[Any]:
    """The output of `generation.generate`, checked by `checked_generation`."""
    try:
        output = generation.generate(data, greedy=greedy)
    except BrokenPromiseError as error:  # of a worker
        raise broken_promise(generation, "generate", str(error)) from None
    return checked_generation(output, data=data, generation=generation)


def checked_generation(output: Any, *, data: Mapping[str, Any], generation: GenerationInterface) -> BatchedDataDict[Any]:
    """Check the output of `generate`, or of a row of `generate_async` that is not a `right_row`.

    Args:
        output: what the engine returned.
        data: the rows of the call.
        generation: the engine; errors name it.

    Returns:
        `output`, unchanged.

    Raises:
        BrokenPromiseError: the engine did not keep a promise of `GenerationOutputSpec`; names the first wrong row.
    """
    rows = data if "input_lengths" in data else with_input_lengths(BatchedDataDict(data))
    check_columns(output, _GENERATED, rows=len(rows["input_lengths"]), component=generation, method="generate")
    if (problem := _first_problem(output, rows, generation)) is not None:
        raise broken_promise(generation, "generate", problem)
    checked: BatchedDataDict[Any] = output
    return checked


class RightRow(NamedTuple):
    """The completion of a row that kept the promises of `GenerationOutputSpec`."""

    token_ids: list[int]
    logprobs: list[float]
    truncated: bool
    weight_version: int
    token_versions: list[int] | None
    """None if all tokens have `weight_version`."""
    sampled_sets: SampledSets | None
    """The sets of the completion's tokens, if they were requested."""


def right_row(output: Any, data: BatchedDataDict[Any], generation: GenerationInterface) -> RightRow | None:
    """Read and check a single short row; None if it is another output, has failed or broke a promise (`checked_generation`).

    Engines that stream return each row by itself, when the caches are cold: every operation of a tensor then takes
    microseconds, and one of numbers does not. So each tensor is read once.

    Args:
        output: what the engine returned.
        data: the row of the call.
        generation: the engine.
    """
    if not isinstance(output, BatchedDataDict) or "failures" in output.data:
        return None
    rows, values = data.data, _short_row(output.data)
    prompts, starts = rows["input_ids"].tolist(), rows["input_lengths"].tolist()
    if values is None or len(starts) != 1 or len(values[0]) != len(values[1]):
        return None
    if _row_problem(0, values, prompts, starts, _limits(rows, generation), generation) or _version_problem(output, rows):
        return None
    if _sets_problem(output, rows):
        return None
    [start], (tokens, logprobs, _, end, truncated, version) = starts, values
    versions = output["token_versions"][0, start:end].tolist() if "token_versions" in output.data else [version]
    mixed, sets = None if {*versions} == {version} else versions, output.data.get(SETS, [None])[0]
    sets = None if sets is None else SampledSets(counts=sets["counts"][start:], words=sets["words"])
    return RightRow(tokens[start:end], logprobs[start:end], truncated, version, mixed, sets)


def check_version(generation: GenerationInterface, output: BatchedDataDict[Any]) -> None:
    """Check that rows sampled without a refit in between have the engine's weight version.

    Raises:
        BrokenPromiseError: a row has another one.
    """
    own = generation.weight_version
    for version in output["weight_version"].unique().tolist():
        if version != own:
            problem = f"returned rows with `weight_version` {version}, but the engine has the weights of version {own}."
            raise broken_promise(generation, "generate", problem)


def scored(method: Callable[..., Any], data: BatchedDataDict[Any], *arguments: Any) -> BatchedDataDict[Any]:
    """Call a scoring method of a model, such as `policy.get_logprobs`, and check its output.

    Args:
        method: a bound method; errors name its object.
        data: the rows of the call, with `input_ids` [B, T] and `input_lengths` [B].
        *arguments: further arguments of the method.

    Returns:
        The output of the method, unchanged.

    Raises:
        BrokenPromiseError: a column is missing or misshapen, has NaN, or log-probabilities are infinite or positive; names
            the first wrong row.
    """
    model, name, shape = getattr(method, "__self__", method), method.__name__, data["input_ids"].shape
    try:
        scores = method(data, *arguments)
    except BrokenPromiseError as error:  # of a worker
        raise broken_promise(model, name, str(error)) from None
    check_columns(scores, SCORE_COLUMNS[name], rows=len(data["input_ids"]), component=model, method=name)
    for key in SCORE_COLUMNS[name]:
        column = scores[key]
        if column.shape[:2] != shape:
            problem: str | None = f"returned `{key}` {list(column.shape)} for `input_ids` {list(shape)}: B and T must be equal."
        else:
            problem = _score_problem(column, key, data)
        if problem is not None:
            raise broken_promise(model, name, problem)
    checked: BatchedDataDict[Any] = scores
    return checked


def _first_problem(output: BatchedDataDict[Any], data: Mapping[str, Any], generation: GenerationInterface) -> str | None:
    """What is wrong with the first wrong row that has not failed, or None."""
    ids, logprobs = output["output_ids"], output["logprobs"]
    if logprobs.shape != ids.shape:
        return f"returned `logprobs` {list(logprobs.shape)} with `output_ids` {list(ids.shape)}. Their shapes must be equal."
    failures, limits = output.get("failures") or [None] * len(ids), _limits(data, generation)
    prompts, starts = data["input_ids"].tolist(), data["input_lengths"].tolist()
    for row, values in enumerate(zip(*(column.tolist() for column in _row_columns(output)), strict=True)):
        if failures[row] is None and (problem := _row_problem(row, values, prompts, starts, limits, generation)) is not None:
            return problem
    return _version_problem(output, data) or _sets_problem(output, data) or _prompt_scores_problem(output, data)


def _short_row(output: Mapping[str, Any]) -> list[Any] | None:
    """The columns of a single short row, without the axis of rows, in the order of `_ROW_KEYS`; None for another output."""
    try:
        tensors = _row_columns(output)
    except KeyError:
        return None
    if {*map(type, tensors)} != {torch.Tensor} or [(x.dtype, x.ndim, x.is_cpu) for x in tensors] != _ROW_LAYOUT:
        return None
    if tensors[0].numel() > _SHORT_ROW:
        return None
    columns = [x.tolist() for x in tensors]
    return [entries[0] for entries in columns] if {*map(len, columns)} == {1} else None


def _version_problem(output: BatchedDataDict[Any], data: Mapping[str, Any]) -> str | None:
    """What is wrong with the first row whose `token_versions` do not fit its completion and its `weight_version`, or None."""
    if "token_versions" not in output:
        return None
    versions, ids = output["token_versions"], output["output_ids"]
    if versions.shape != ids.shape or versions.dtype != torch.int64:
        return f"returned `token_versions` {list(versions.shape)} {versions.dtype}. They must be int64 {list(ids.shape)}."
    ends = zip(data["input_lengths"].tolist(), output["unpadded_sequence_lengths"].tolist(), strict=True)
    oldest = output["weight_version"].tolist()
    for row, (own, (start, end)) in enumerate(zip(versions.tolist(), ends, strict=True)):
        in_prompt = {*own[:start]} - {-1}  # padding depends on whether the outputs of several replicas were joined
        if in_prompt or (start < end and min(own[start:end], default=oldest[row]) != oldest[row]):
            return (
                f"returned `token_versions` from {min(own[start:end], default=-1)} in row {row}, whose `weight_version` is "
                f"{oldest[row]}: it must be the smallest of its sampled tokens, and tokens of the prompt must have -1."
            )
    return None


def _sets_problem(output: BatchedDataDict[Any], data: Mapping[str, Any]) -> str | None:
    """What is wrong with the sets of kept tokens of the rows that requested them (`sampling`), or None."""
    requests, failures = data.get("sampling", ()), output.get("failures")
    rows = [row for row, own in enumerate(requests) if (own or {}).get(SETS) and (failures is None or failures[row] is None)]
    if not rows:
        return None
    found: list[SampledSets | None] = [output[SETS][row] for row in rows] if SETS in output else [None] * len(rows)
    sets, ends = [each for each in found if each is not None], output["unpadded_sequence_lengths"][rows]
    sizes = [len(each["counts"]) for each in sets if len(each["words"]) == int(each["counts"].sum())]
    if sizes != ends.tolist():
        return f"returned no `{SETS}` for each token of prompt and completion of the rows whose `sampling` requests them."
    joined = joined_sets(sets)  # all rows at once: a call has thousands of tokens
    tokens = torch.cat([output["output_ids"][row, :end] for row, end in zip(rows, ends, strict=True)])
    is_sampled = torch.cat([torch.arange(end) >= int(data["input_lengths"][row]) for row, end in zip(rows, ends, strict=True)])
    (position, ids), has_none = kept_tokens(joined), joined["counts"] == 0
    fits = torch.where(is_sampled, has_none.index_fill(0, position[ids == tokens[position]], True), has_none)
    if bool(fits.all()):
        return None
    number = int(fits.int().argmin())
    return (
        f"returned a set in `{SETS}` of row {rows[int((ends.cumsum(0) <= number).sum())]} that does not fit its token "
        f"{int(tokens[number])}: the set of a sampled token contains it, and other tokens have none."
    )


def _prompt_scores_problem(output: BatchedDataDict[Any], data: Mapping[str, Any]) -> str | None:
    """What is wrong with the first row whose `sampling` requests log-probabilities of its prompt, or None."""
    failures, column = output.get("failures"), output.get(PROMPT_LOGPROBS)
    for row, own in enumerate(data.get("sampling", ())):
        if (own or {}).get(PROMPT_LOGPROBS) is None or (failures is not None and failures[row] is not None):
            continue
        scores = (column[row] if column is not None else None) or []
        prompt = data["input_ids"][row, : int(data["input_lengths"][row])].tolist()
        if [[token for token, _ in scored[:1]] for scored in scores] != [[], *([token] for token in prompt[1:])]:
            return (
                f"returned no `{PROMPT_LOGPROBS}` for the {len(prompt)} tokens of the prompt of row {row}: an empty list for "
                "the first, and for each other one a list that begins with its id and log-probability."
            )
        if not all(logprob <= _LARGEST_LOGPROB for scored in scores for _, logprob in scored):  # also if it is NaN
            return f"returned a value above 0 or NaN in `{PROMPT_LOGPROBS}` of row {row}, which is not a log-probability."
    return None


def _limits(data: Mapping[str, Any], generation: GenerationInterface) -> Sequence[int]:
    """Maximum number of new tokens of each row."""
    if "max_new_tokens" in data:
        limits: list[int] = data["max_new_tokens"].tolist()
        return limits
    section: Any = getattr(generation, "config", None)
    return [section.max_new_tokens if isinstance(section, GenerationConfig) else _NO_LIMIT] * len(data["input_lengths"])


def _row_problem(
    row: int,
    values: Sequence[Any],
    prompts: Sequence[list[int]],
    starts: Sequence[int],
    limits: Sequence[int],
    generation: GenerationInterface,
) -> str | None:
    """The first broken promise about a row, or None; `values` are in the order of `_ROW_KEYS`. A server may return no text."""
    tokens, logprobs, sampled, end, *_ = values
    start, limit = starts[row], limits[row]
    if tokens[:start] != prompts[row][:start]:
        return f"returned row {row} without its own prompt at the beginning{_other_prompt(tokens, row, prompts, starts)}."
    if start + sampled != end or sampled < 0 or end > len(tokens):
        return (
            f"returned row {row} with `generation_lengths` {sampled} and `unpadded_sequence_lengths` {end} in `output_ids` of "
            f"width {len(tokens)}. Its prompt has {start} tokens, so the second must be {start} more than the first and at "
            "most the width."
        )
    if sampled > limit:
        return f"sampled {sampled} tokens in row {row}, more than its limit (`max_new_tokens`) of {limit}."
    if not sampled and not generation.has_own_weights:
        return (
            f"returned no token in row {row}. A completion has at least its end-of-sequence token; a row that could not be "
            "sampled has its reason in `failures`."
        )
    if any(logprobs[:start]) or any(logprobs[end:]):
        value = next(filter(None, [*logprobs[:start], *logprobs[end:]]))
        return f"returned a log-probability of {value:g} outside of the completion of row {row}. It must be 0.0 there."
    if (smallest := min(tokens[start:end], default=0)) < 0:
        return f"returned the token id {smallest} in row {row}."
    of_completion = logprobs[start:end]
    # Unlike a maximum, a sum is NaN if one of the values is.
    if max(of_completion, default=0.0) <= _LARGEST_LOGPROB and sum(of_completion) > -math.inf:
        return None
    at, value = next((at, x) for at, x in enumerate(of_completion) if not -math.inf < x <= _LARGEST_LOGPROB)
    return (
        f"returned a log-probability of {value:g} for token {at} of the completion of row {row}. It must "
        "be finite and at most 0: the natural logarithm of the token's probability."
    )


def _other_prompt(tokens: list[int], row: int, prompts: Sequence[list[int]], starts: Sequence[int]) -> str:
    """The row whose prompt was returned instead, if there is one."""
    for other, length in enumerate(starts):
        if other != row and tokens[:length] == prompts[other][:length]:
            return f": it begins with the prompt of row {other}. Rows must have the order of the call"
    return ". `output_ids` must contain prompt and completion, in the order of the call"


def _score_problem(column: torch.Tensor, key: str, data: Mapping[str, Any]) -> str | None:
    """The first wrong value. Rows in another order are found by comparison with the engine."""
    if key == "topk_token_ids":
        return None
    # Tokens outside the vocabulary may be among the top K of a padded embedding, with a probability of 0.
    wrong = column.isnan().flatten(1) if key == "topk_logprobs" else ~column.isfinite()
    if key in ("logprobs", "reference_logprobs"):
        wrong = wrong | (column > _LARGEST_LOGPROB)
    if not wrong.any():
        return None
    row, at = divmod(int(wrong.int().argmax()), wrong.shape[1])
    value = "NaN" if key == "topk_logprobs" else f"{float(column[row, at]):g} at position {at}"
    promise = "Values must be finite" if key == "values" else "Log-probabilities must be finite and at most 0"
    return f"returned {value} in `{key}` of row {row}, which has {int(data['input_lengths'][row])} tokens. {promise}."


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


class NanGradientLoss(LossFunction):
    """A loss of 0 whose gradient is NaN in the first microbatch of each rank."""

    def __init__(self, rows_per_unit: int) -> None:
        self.rows_per_unit, self._is_first = rows_per_unit, True

    def __call__(self, next_token_logprobs: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        """The loss, without metrics."""
        is_first, self._is_first = self._is_first, False
        mean = next_token_logprobs.mean()
        return ((mean * 0.0).sqrt() if is_first else mean - mean.detach()), {}
