"""Checks that a run makes before it starts workers: imports, tokenizer, data, backend checks. Does not load weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rl_core.config.diagnostics import Problem
from rl_core.errors import UserError
from rl_core.interfaces.loss import LossFunction
from rl_core.plugins.registry import Registry
from rl_train.assembly.contracts import contract_conflicts
from rl_train.assembly.error_locations import problem_in_section
from rl_train.assembly.model_checks import (
    length_conflicts,
    length_warnings,
    missing_models,
    refuse_other_tokenizers,
)
from rl_train.assembly.preparation import Preparation
from rl_train.assembly.run_assembly import loss_of
from rl_train.config.loader import LoadedConfig
from rl_train.config.rules import RULES
from rl_train.config.rules.components import sections_of
from rl_train.config.rules.rule import CheckedConfig, Stage, run_rules
from rl_train.config.schema import RunConfig


def deep_conflicts(loaded: LoadedConfig, registry: Registry) -> Iterator[Problem]:
    """Import referenced modules, load the tokenizer and read the data; yields each wrong key with the reason."""
    problems = list(_imports(loaded))
    yield from problems
    if not problems:
        yield from run_rules(RULES, CheckedConfig(run=loaded.run, registry=registry), Stage.IMPORTED).problems
        loss_fn: LossFunction | None = None
        try:
            loss_fn = loss_of(loaded.run, registry)
        except UserError as error:
            yield Problem(tuple((error.key or "loss_fn").split(".")), str(error))
        yield from contract_conflicts(loaded.run, registry, loss_fn)
    missing: set[str] = set()
    for names, problem in missing_models(loaded.run):
        yield problem
        missing |= names
    for path, section in sections_of(loaded.run):
        if path[0] in missing:
            continue
        try:
            for inner, message in section.deep_conflicts(loaded.run):
                yield Problem((*path, *inner), message)
        except UserError as error:
            yield problem_in_section(error, path, loaded)
    if missing:
        return
    yield from length_conflicts(loaded.run)
    data_problem = _problem_of(lambda: _load_data(loaded, registry))
    if data_problem is not None:
        yield data_problem


def deep_warnings(loaded: LoadedConfig) -> Iterator[Problem]:
    """Settings that are valid for the models and the data, but probably not intended."""
    yield from length_warnings(loaded.run)


def _imports(loaded: LoadedConfig) -> Iterator[Problem]:
    for at, component in loaded.components.items():
        problem = _problem_of(component.load, key=at)
        if problem is not None:
            yield problem


def _load_data(loaded: LoadedConfig, registry: Registry) -> RunConfig:
    """The first steps of a run: the tokenizer, the data, and the first row of each dataset as tokens."""
    prepared = Preparation(loaded.run, registry)
    refuse_other_tokenizers(loaded.run, prepared.tokenizer)
    return prepared.training_config


def _problem_of(step: Callable[[], object], *, key: str = "") -> Problem | None:
    try:
        step()
    except UserError as error:
        at = error.key or key
        return Problem(tuple(at.split(".")) if at else (), str(error))
    return None
