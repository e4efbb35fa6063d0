"""Models: their files exist, the backends can load them, and they have positions for the longest rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from rl_core.config.diagnostics import Problem
from rl_core.config.section import ComponentSection
from rl_core.config.source_tree import KeyPath
from rl_core.errors import UserError
from rl_train.assembly.error_locations import problem_in_section
from rl_train.assembly.model_checks import (
    length_conflicts,
    length_warnings,
    refuse_other_end_tokens,
    refuse_other_tokenizers,
    tensor_problems,
    tokenizer_key,
    tokenizer_problems,
    tokenizer_warnings,
)
from rl_train.assembly.rules.run_facts import RunFacts
from rl_train.config.partial_sections import UnavailableError
from rl_train.config.rules.components import each_section
from rl_train.config.rules.models import MODELS, models_of
from rl_train.config.rules.rule import CONFIG_FILE, Stage, rule

_FILES = tuple(f"{name}.{key}" for name in MODELS for key in ("model_name", "tokenizer.name"))


def _each_source(config: RunFacts) -> Iterator[tuple[KeyPath, str]]:
    """The first key of each model and tokenizer, and its name: one that several sections name is one mistake."""
    sources: dict[str, KeyPath] = {}
    for name, model in models_of(config.run).items():
        with suppress(UnavailableError):  # the name itself is invalid
            source = model.tokenizer.name or model.model_name
            sources.setdefault(source, (name, *tokenizer_key(model).split(".")))
    yield from ((path, source) for source, path in sources.items())


@rule(*_FILES, stage=Stage.IMPORTED, applies_to=CONFIG_FILE, each=_each_source)
def model_exists(config: RunFacts, path: KeyPath, source: str) -> Iterator[Problem]:
    """A model or tokenizer is a path that exists, or a name on the hub."""
    config.require_unreported(path)
    if (problem := config.missing_source(source)) is not None:
        yield Problem(path, problem)


@rule(*_FILES, "policy.generation.model_name", stage=Stage.IMPORTED, applies_to=CONFIG_FILE)
def tensors_are_those_of_the_config(config: RunFacts) -> Iterator[Problem]:
    """The files of each local model have the tensors that its config describes."""
    config.require_models()
    yield from tensor_problems(config.run)


@rule(*_FILES, stage=Stage.IMPORTED)
def tokens_of_every_row_have_embeddings(config: RunFacts) -> Iterator[Problem]:
    """The tokenizer's start, end and padding tokens have a row in the model's embedding."""
    yield from tokenizer_problems(config.run, config.tokenizer)


@rule(*_FILES, stage=Stage.IMPORTED, warns=True)
def all_tokens_have_embeddings(config: RunFacts) -> Iterator[Problem]:
    """All tokens of the tokenizer have a row in the model's embedding."""
    yield from tokenizer_warnings(config.run, config.tokenizer)


@rule("every component", stage=Stage.IMPORTED, each=each_section)
def component_supports_what_it_names(config: RunFacts, path: KeyPath, section: ComponentSection) -> Iterator[Problem]:
    """What backends and other components check with torch or with the files of a model: `deep_conflicts` of their sections."""
    config.require_unreported((*path, "model_name"))
    for name, model in models_of(config.run).items():
        if path[0] == name:
            config.require_model(name, model)
    if path == ("policy",) and not config.starts_policy:
        return
    try:
        for inner, message in section.deep_conflicts(config.run):
            yield Problem((*path, *inner), message)
    except UserError as error:
        yield Problem(path, str(error)) if config.located is None else problem_in_section(error, path, config.located)


@rule(*_FILES, "policy.generation.model_name", stage=Stage.IMPORTED)
def rows_fit_the_positions(config: RunFacts) -> Iterator[Problem]:
    """A model without rotary embeddings has positions for the longest rows."""
    config.require_models()
    yield from length_conflicts(config.run) if config.starts_policy else ()


@rule(*_FILES, "policy.generation.model_name", stage=Stage.IMPORTED, warns=True)
def rows_fit_the_trained_positions(config: RunFacts) -> Iterator[Problem]:
    """A model with rotary embeddings was trained for the positions of the longest rows."""
    config.require_models()
    yield from length_warnings(config.run) if config.starts_policy else ()


@rule(*_FILES, stage=Stage.IMPORTED)
def companions_have_the_tokenizer_of_the_policy(config: RunFacts) -> None:
    """A value model and a teacher have the tokenizer of the policy, because they receive its token ids."""
    refuse_other_tokenizers(config.run, config.tokenizer)


@rule(*_FILES, "policy.generation", stage=Stage.IMPORTED)
def end_of_sequence_token_is_of_the_model(config: RunFacts) -> None:
    """The end-of-sequence token that `policy.generation` repeats is one of the model's."""
    config.require_models()
    generation = config.run.policy.generation
    if generation is not None and (generation.model_name is None or config.missing_source(generation.model_name) is None):
        refuse_other_end_tokens(config.run)
