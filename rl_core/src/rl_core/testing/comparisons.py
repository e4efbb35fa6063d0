"""Comparisons with the reference or with the state before a call, and sections of components without a config file."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NotRequired, TypeVar, get_origin, get_type_hints
from unittest import SkipTest

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from rl_core.config.section import Section
from rl_core.config.validator import section_of_values
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.generation_io import SETS, kept_tokens
from rl_core.dispatch.worker_facade import WorkerFacade
from rl_core.errors import WrongKindError
from rl_core.plugins.component import Component, did_you_mean, is_path
from rl_core.testing.promises import Found
from rl_core.testing.reference import ReferenceModel, Weights, limited


def check_logprobs(found: torch.Tensor, expected: torch.Tensor, *, tolerance: float, when: str) -> str:
    """Compare log-probabilities [B, T], in nats; returns the largest difference.

    Raises:
        Found: a difference is larger than the tolerance, or not a number.
    """
    difference = (found - expected).abs()
    largest = float(difference.max())
    if not largest <= tolerance:
        row, token = divmod(int(difference.argmax()), found.shape[1])
        raise Found(
            f"token {token} of row {row} has the log-probability {float(found[row, token]):.4f} {when}, and the reference "
            f"{float(expected[row, token]):.4f}."
        )
    return f"largest difference {largest:.1e} nats"


def check_sets(
    output: BatchedDataDict[Any], model: ReferenceModel, weights: Weights, *, temperature: float, **limits: Any
) -> None:
    """Compare the sets of sampled tokens, if there are any, with those that `limited` keeps of the reference's distribution."""
    for row, sets in enumerate(output.get(SETS, ())):
        tokens, end = output["output_ids"][row], int(output["unpadded_sequence_lengths"][row])
        start = end - int(output["generation_lengths"][row])
        kept = limited(model.log_distributions(weights, tokens[: end - 1], temperature=temperature), **limits)[start - 1 :]
        found = torch.zeros(end, kept.shape[1], dtype=torch.bool)
        found[kept_tokens(sets)] = True
        wrong = ((found[start:] != (kept > -torch.inf)) & ~kept.isnan()).any(dim=-1)
        if (at := int(wrong.int().argmax())) or bool(wrong[0]):
            expected, own = ((each[at] > 0).nonzero().flatten().tolist() for each in (kept.exp(), found[start:]))
            raise Found(f"the set of token {at} of the completion of row {row} is {own} with {limits}. It must be {expected}.")


def check_unchanged(name: str, call: Callable[[BatchedDataDict[Any]], Any], rows: BatchedDataDict[Any]) -> None:
    """Call a function with copies of the rows.

    Raises:
        Found: it changed, added or removed columns.
    """
    passed: BatchedDataDict[Any] = BatchedDataDict(copy.deepcopy(dict(rows)))
    call(passed)
    changed = [
        key for key in sorted({*rows, *passed}) if key not in rows or key not in passed or _differ(rows[key], passed[key])
    ]
    if changed:
        raise Found(f"`{name}` changed the columns {', '.join(changed)}.")


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return not torch.equal(one, other)
    return list(one) != list(other)


def check_facts(component: Any, spec: type, **expected: int) -> str:
    """Check what the workers of a backend reported when they had loaded.

    Args:
        component: a policy or an engine.
        spec: `PolicyFacts` or `GenerationFacts`.
        expected: values of some of the facts.

    Raises:
        Found: a required fact is missing, a fact has another type or value, or there is no such fact.
        SkipTest: the component has no workers.
    """
    if not isinstance(component, WorkerFacade):
        raise SkipTest("only a backend with workers reports facts")
    facts, worker = component.facts, component.worker_class.__name__
    kinds = get_type_hints(spec, include_extras=True)
    required = [name for name, kind in kinds.items() if get_origin(kind) is not NotRequired]
    for name in [*required, *facts]:
        if name not in facts:
            raise Found(f"`setup` or `load` of {worker} does not return the fact `{name}`, which is required.")
        if name not in kinds:
            raise Found(f"{worker} returns {name!r}, but there is no such fact.{did_you_mean(name, [*kinds])}")
        kind = get_type_hints(spec)[name]
        try:
            TypeAdapter(kind).validate_python(facts[name], strict=True)
        except ValidationError:
            label = getattr(kind, "__name__", kind)
            raise Found(f"{worker} returns {facts[name]!r} as the fact `{name}`. It must be {label}.") from None
        if facts[name] != expected.get(name, facts[name]):
            hint = " Are all saved buffers in `buffers` of the ReferenceModel?" if name == "num_parameters" else ""
            raise Found(
                f"{worker} returns {facts[name]} as the fact `{name}`, and the model of the test {expected[name]}.{hint}"
            )
    return ", ".join(facts)


SectionT = TypeVar("SectionT", bound=Section)


def section_of(component: Component, base: type[SectionT], values: Mapping[str, Any]) -> SectionT:
    """The section of a component with these values; as in a config, unknown keys reach a class given by its path.

    Args:
        component: the component.
        base: the base class of sections of its kind.
        values: keys of the section.

    Raises:
        ConfigError: a key is unknown or a value is not allowed.
        WrongKindError: the config model does not extend the base class.
    """
    model: Any = component.load_config() or base
    if model is base and is_path(component.name):

        class Opened(base):  # type: ignore[valid-type,misc]
            model_config = ConfigDict(extra="allow")

        model = Opened
    section: Any = section_of_values(model, values, name="config")
    if not isinstance(section, base):
        raise WrongKindError(f"{component.config} does not extend {base.__module__}.{base.__name__}.")
    return section
