"""Finds what a run would find before it starts a worker: imports, tokenizer, data, backends' checks. Loads no weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rl_core.data.tokenizer import load_policy_tokenizer
from rl_core.errors import UserError
from rl_core.plugins.registry import Registry
from rl_train.config.component_checks import Finding, sections_of
from rl_train.config.loader import LoadedConfig
from rl_train.runtime.build import DataLoaders, read_sources, refuse_other_tokenizers
from rl_train.runtime.late_errors import blaming, problem_in_section


def deep_conflicts(loaded: LoadedConfig, registry: Registry) -> Iterator[Finding]:
    """Each wrong key and the reason; a step whose inputs are wrong is left out."""
    yield from _imports(loaded)
    for path, section in sections_of(loaded.run):
        try:
            for inner, message in section.deep_conflicts(loaded.run):
                yield (*path, *inner), message
        except UserError as error:
            problem = problem_in_section(error, path, loaded)
            yield problem.path, problem.message
    unread = _problem_of(lambda: _read_everything(loaded, registry))
    if unread is not None:
        yield unread


def _imports(loaded: LoadedConfig) -> Iterator[Finding]:
    for at, component in loaded.components.items():
        problem = _problem_of(component.load, key=at)
        if problem is not None:
            yield problem


def _read_everything(loaded: LoadedConfig, registry: Registry) -> None:
    """The first steps of a run: the tokenizer, the data, and the first row of each dataset as tokens."""
    config = loaded.run
    tokenizer_section = config.policy.tokenizer
    with blaming("policy.tokenizer.name" if tokenizer_section.name else "policy.model_name"):
        tokenizer = load_policy_tokenizer(config.policy)
    refuse_other_tokenizers(config, tokenizer)
    with blaming("data"):
        train, validation = read_sources(config, registry)
        loaders = DataLoaders(config, tokenizer, train=train, validation=validation)
    loaders.settled(config)


def _problem_of(step: Callable[[], object], *, key: str = "") -> Finding | None:
    try:
        step()
    except UserError as error:
        at = error.key or key
        return tuple(at.split(".")) if at else (), str(error)
    return None
