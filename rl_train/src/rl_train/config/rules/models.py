"""The policy and its companion models: heads, lengths and batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from rl_core.config.diagnostics import Problem, show
from rl_core.config.schema import GenerationConfig, PolicyConfig
from rl_core.config.source_tree import KeyPath
from rl_core.plugins.component import Kind
from rl_train.config.rules.rule import TRAINING, CheckedConfig, rule
from rl_train.config.schema import RunConfig
from rl_train.config.slots import COMPANIONS, sections_at, slots_of

MODELS = ("policy", *COMPANIONS)
"""Sections of models."""


def models_of(run: RunConfig) -> dict[str, PolicyConfig]:
    """The policy and its companion models, by section name."""
    return {str(slot.path[0]): model for slot in slots_of(Kind.POLICY) for _, model in sections_at(run, slot.path)}


def each_model(config: CheckedConfig) -> Iterator[tuple[str, PolicyConfig]]:
    """The models of a config, for rules that check each of them."""
    yield from models_of(config.run).items()


def each_engine(config: CheckedConfig) -> Iterator[tuple[GenerationConfig]]:
    """The section `policy.generation`, for rules that check it if there is one."""
    if config.run.policy.generation is not None:
        yield (config.run.policy.generation,)


def each_interpreter(config: CheckedConfig) -> Iterator[tuple[KeyPath, Kind, PolicyConfig | GenerationConfig]]:
    """The sections of models and of the engine that name an interpreter."""
    run = config.run
    for name, model in models_of(run).items():
        if model.python is not None:
            yield (name,), Kind.POLICY, model
    engine = run.policy.generation
    if engine is not None and engine.python is not None:
        yield ("policy", "generation"), Kind.GENERATION, engine


@rule("algorithm", "loss_fn", applies_to=TRAINING)
def loss_is_for_the_head_of_the_policy(config: CheckedConfig) -> Iterator[Problem]:
    """A loss for value models does not train the log-probabilities of a policy."""
    run = config.run
    if run.loss_fn.head == "scalar" and run.algorithm.head == "tokens":
        yield Problem(
            ("loss_fn", "name"),
            f"{run.loss_fn.name} is a loss for value models, but {run.algorithm_name} trains the log-probabilities of a "
            "policy: remove it.",
        )


@rule("algorithm", "policy.head", applies_to=TRAINING)
def policy_has_the_head_that_is_trained(config: CheckedConfig) -> Iterator[Problem]:
    """The policy has the head that the algorithm trains."""
    name, head, wanted = config.run.algorithm_name, config.run.policy.head, config.run.algorithm.head
    if head != wanted:
        yield Problem(("policy", "head"), f"head is {head!r}, but {name} trains a model with head {wanted!r}: remove the key.")


@rule("algorithm", "policy.frozen", applies_to=TRAINING)
def policy_is_not_frozen(config: CheckedConfig) -> Iterator[Problem]:
    """The policy is trained, so it is not frozen."""
    if config.run.policy.frozen:
        name = config.run.algorithm_name
        yield Problem(("policy", "frozen"), f"{name} trains the policy, so it cannot be frozen: remove the key.")


@rule("algorithm", *COMPANIONS, applies_to=TRAINING, each=lambda _: [(name,) for name in COMPANIONS])
def companions_keep_what_their_section_implies(config: CheckedConfig, companion: str) -> Iterator[Problem]:
    """A value model is trained and has a scalar head; a teacher is frozen and scores tokens; neither samples."""
    model = getattr(config.run, companion)
    if model is None or companion not in config.run.algorithm.runtime_needs.companions:
        return
    for key, value in COMPANIONS[companion].items():
        if getattr(model, key) != value:
            yield Problem((companion, key), f"must be {show(value)} for a {companion}, which is the default: remove the key.")
    if model.generation is not None:
        yield Problem((companion, "generation"), f"a {companion} does not sample; only the policy does. Remove the section.")


@rule("policy.max_total_sequence_length", "policy.generation.max_new_tokens", each=each_engine)
def completions_leave_tokens_for_a_prompt(config: CheckedConfig, generation: GenerationConfig) -> Iterator[Problem]:
    """The longest completion is shorter than a row of the policy."""
    policy = config.run.policy
    if generation.max_new_tokens >= policy.max_total_sequence_length:
        yield Problem(
            ("policy", "generation", "max_new_tokens"),
            f"{generation.max_new_tokens} leaves no tokens for a prompt: policy.max_total_sequence_length, for prompt "
            f"and completion together, is {policy.max_total_sequence_length}. Lower max_new_tokens or increase that length.",
        )


@rule(*(f"{name}.max_total_sequence_length" for name in MODELS), each=each_model)
def companions_fit_the_rows_of_the_policy(config: CheckedConfig, name: str, model: PolicyConfig) -> Iterator[Problem]:
    """Every model is long enough for the rows of the policy."""
    length = config.run.policy.max_total_sequence_length
    if model.max_total_sequence_length < length:
        yield Problem(
            (name, "max_total_sequence_length"),
            f"{model.max_total_sequence_length} tokens are too few for the policy's rows of up to {length}: raise it to that "
            "(${policy.max_total_sequence_length}).",
        )


@rule("algorithm", *MODELS, each=each_model)
def microbatches_fit_the_longest_rows(config: CheckedConfig, name: str, model: PolicyConfig) -> Iterator[Problem]:
    """A microbatch of packed or dynamically batched rows has room for the rows that the loss compares."""
    for batching, key in itertools.product(("dynamic_batching", "sequence_packing"), ("train_mb_tokens", "logprob_mb_tokens")):
        section = getattr(model, batching)
        rows = _rows_that_stay_together(config.run, name) if key == "train_mb_tokens" else 1
        budget, needed = getattr(section, key), rows * model.max_total_sequence_length
        if section.enabled and budget < needed:
            what = "one row" if rows == 1 else f"the {rows} rows that the loss compares, each"
            yield Problem(
                (name, batching, key),
                f"{budget} tokens are too few for {what} of {name}.max_total_sequence_length "
                f"({model.max_total_sequence_length}): raise it to {needed}, or lower the length.",
            )


def _rows_that_stay_together(run: RunConfig, model: str) -> int:
    plan = run.algorithm.training_plan(model, run)
    return 1 if plan is None else plan.rows_per_unit
