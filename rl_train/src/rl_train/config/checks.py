"""Checks that span several sections: compatibility of algorithm, backends, data and cluster."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from rl_core.config.diagnostics import show
from rl_core.config.schema import GenerationConfig, PolicyConfig
from rl_core.config.source_tree import KeyPath, dotted
from rl_core.errors import PluginError
from rl_core.plugins.component import Kind, is_path
from rl_core.plugins.registry import Registry
from rl_core.plugins.requirements import unmet_needs
from rl_train.config.agent_checks import agent_conflicts
from rl_train.config.canary_checks import canary_conflicts
from rl_train.config.component_checks import Finding, component_conflicts, models_of
from rl_train.config.config_layout import ConfigLayout
from rl_train.config.data_checks import data_conflicts, validates
from rl_train.config.lr_schedule_checks import schedule_conflicts
from rl_train.config.optimizer_checks import optimizer_conflicts, unused_by_frozen
from rl_train.config.resource_checks import in_process_conflicts, profiling_conflicts
from rl_train.config.schema import RunConfig
from rl_train.config.segment_checks import segment_conflicts
from rl_train.config.slots import COMPANIONS
from rl_train.config.tool_checks import tool_parser_conflicts
from rl_train.config.transport_checks import transport_conflicts
from rl_train.config.turn_checks import turn_conflicts


def cross_check(run: RunConfig, layout: ConfigLayout, registry: Registry, *, for_training: bool = True) -> Iterator[Finding]:
    """Conflicts between sections that are each valid on their own.

    Args:
        run: The valid sections.
        layout: The components that the sections name.
        registry: Provides the capabilities of the components.
        for_training: Whether the run trains; if not, rules that only concern training do not apply.
    """
    yield from _missing_sections(run)
    yield from section_conflicts(run, registry, for_training=for_training)
    yield from in_process_conflicts(run)
    yield from profiling_conflicts(run)
    yield from data_conflicts(run)
    yield from transport_conflicts(run, registry)
    yield from _unmet_requirements(run, layout)


def section_conflicts(run: RunConfig, registry: Registry, *, for_training: bool = True) -> Iterator[Finding]:
    """Conflicts that are checked for runs from config files and from Python objects.

    Args:
        run: The valid sections.
        registry: Provides the capabilities of the components.
        for_training: As in `cross_check`.
    """
    yield from run.algorithm.conflicts(run)
    yield from component_conflicts(run)
    yield from _companion_conflicts(run)
    yield from _optimizers(run)
    yield from schedule_conflicts(run)
    if for_training:
        yield from _sampling(run)
    yield from _lengths(run)
    yield from turn_conflicts(run)
    yield from segment_conflicts(run)
    yield from agent_conflicts(run, registry)
    yield from _scored_rows(run)
    yield from tool_parser_conflicts(run)
    yield from _capabilities(run, registry)
    yield from canary_conflicts(run, registry)


def _missing_sections(run: RunConfig) -> Iterator[Finding]:
    name, algorithm = run.algorithm_name, run.algorithm
    if algorithm.needs_generation and run.policy.generation is None:
        yield ("policy", "generation"), f"is required: {name} samples from the policy. Choose a generation `backend`."
    if algorithm.needs_generation and algorithm.needs_rewards and not run.env:
        yield ("env",), f"is required: {name} trains on rewards from an environment. Add one, such as `math:`."
    if algorithm.runtime_needs.training_data and not run.data.has_training_data:
        yield ("data", "train"), f"is required: {name} needs training data. Set `dataset_name`, or `data.train_data_path`."
    if validates(run) and not run.data.has_validation_data:
        setting = next(key for key in ("val_period", "val_at_start", "val_at_end") if getattr(algorithm, key))
        yield (
            (name, setting),
            "enables validation, but there is no validation data: set data.validation or data.split, or disable validation.",
        )


def _scored_rows(run: RunConfig) -> Iterator[Finding]:
    """A minimum of scored rows that no group can reach."""
    rollouts = run.algorithm.runtime_needs.rollouts
    needed = run.rollout.min_scored
    if needed is not None and rollouts is not None and needed > rollouts.samples_per_prompt:
        yield (
            ("rollout", "min_scored"),
            f"{needed} scored rows are more than the {rollouts.samples_per_prompt} samples of a group, so every group would be "
            f"replaced. Set it to {rollouts.samples_per_prompt} or less.",
        )


def _sampling(run: RunConfig) -> Iterator[Finding]:
    """Sampling settings other than the temperature that make the sampling distribution differ from the policy's."""
    generation = run.policy.generation
    if generation is None or not run.algorithm.needs_generation:
        return
    filters = {} if run.algorithm.allows_filtered_sampling else generation.sampling_filters()
    for key, neutral in filters.items():
        yield (
            ("policy", "generation", *key),
            f"{run.algorithm_name} cannot train on filtered samples: the engine would sample from a filtered distribution "
            "while the policy scores tokens under the whole one, so every probability ratio would be wrong. Set it to "
            f"{show(neutral)}; temperature is accounted for.",
        )
    for key, neutral in generation.logit_changes().items():
        yield (
            ("policy", "generation", *key),
            f"{run.algorithm_name} cannot train on samples from changed logits: the policy scores tokens without the change, "
            f"so every probability ratio would be wrong. Set it to {show(neutral)}.",
        )


def _companion_conflicts(run: RunConfig) -> Iterator[Finding]:
    """Wrong head types of the policy, loss and companion models, and companion models that are missing or unused."""
    name, algorithm = run.algorithm_name, run.algorithm
    if run.loss_fn.head == "scalar" and algorithm.head == "tokens":
        yield (
            ("loss_fn", "name"),
            f"{run.loss_fn.name} is a loss for value models, but {name} trains the log-probabilities of a policy: remove it.",
        )
    if run.policy.head != algorithm.head:
        yield (
            ("policy", "head"),
            (f"head is {run.policy.head!r}, but {name} trains a model with head {algorithm.head!r}: remove the key."),
        )
    if run.policy.frozen:
        yield ("policy", "frozen"), f"{name} trains the policy, so it cannot be frozen: remove the key."
    for companion in COMPANIONS:
        model, wanted = getattr(run, companion), companion in algorithm.runtime_needs.companions
        if model is not None and wanted:
            yield from _companion_values(companion, model)
        elif model is not None:
            yield (companion,), f"{name} does not use a {companion}: remove the section."
        elif wanted:
            yield (
                (companion,),
                f"is required: {name} needs a {companion} model. Set its `backend` and `model_name`.",
            )


def _companion_values(companion: str, model: PolicyConfig) -> Iterator[Finding]:
    for key, value in COMPANIONS[companion].items():
        if getattr(model, key) != value:
            yield (companion, key), f"must be {show(value)} for a {companion}, which is the default: remove the key."
    if model.generation is not None:
        yield (companion, "generation"), f"a {companion} does not sample; only the policy does. Remove the section."


def _optimizers(run: RunConfig) -> Iterator[Finding]:
    for name, model in models_of(run).items():
        for path, message in unused_by_frozen(model) if model.frozen else optimizer_conflicts(model):
            yield (name, *path), message


def _lengths(run: RunConfig) -> Iterator[Finding]:
    policy, generation = run.policy, run.policy.generation
    if generation is not None and generation.max_new_tokens >= policy.max_total_sequence_length:
        yield (
            ("policy", "generation", "max_new_tokens"),
            f"{generation.max_new_tokens} leaves no tokens for a prompt: policy.max_total_sequence_length, for prompt "
            f"and completion together, is {policy.max_total_sequence_length}. Lower max_new_tokens or increase that length.",
        )
    for name, model in models_of(run).items():
        if model.max_total_sequence_length < policy.max_total_sequence_length:
            yield (
                (name, "max_total_sequence_length"),
                f"{model.max_total_sequence_length} tokens are too few for the policy's rows of up to "
                f"{policy.max_total_sequence_length}: raise it to that (${{policy.max_total_sequence_length}}).",
            )
        for batching, key in itertools.product(
            ("dynamic_batching", "sequence_packing"), ("train_mb_tokens", "logprob_mb_tokens")
        ):
            section = getattr(model, batching)
            rows = _rows_that_stay_together(run, name) if key == "train_mb_tokens" else 1
            budget, needed = getattr(section, key), rows * model.max_total_sequence_length
            if section.enabled and budget < needed:
                what = "one row" if rows == 1 else f"the {rows} rows that the loss compares, each"
                yield (
                    (name, batching, key),
                    f"{budget} tokens are too few for {what} of {name}.max_total_sequence_length "
                    f"({model.max_total_sequence_length}): raise it to {needed}, or lower the length.",
                )


def _rows_that_stay_together(run: RunConfig, model: str) -> int:
    plan = run.algorithm.training_plan(model, run)
    return 1 if plan is None else plan.rows_per_unit


def _capabilities(run: RunConfig, registry: Registry) -> Iterator[Finding]:
    for key, setting, section, kind, capability in (*_required_capabilities(run), *_required_by_loss(run)):
        model: PolicyConfig | GenerationConfig | None = models_of(run)[str(section[0])]
        if kind is Kind.GENERATION:
            model = run.policy.generation
        # A backend given by its path declares its capabilities on its class, which only the run imports. A backend created
        # in Python may be unregistered.
        if model is None or is_path(model.backend) or model.backend not in registry.names(kind):
            continue
        try:
            registry.find(kind, model.backend, requires=(capability,))
        except PluginError as error:
            yield key, f"{setting} is not supported by {dotted(section)}. {error}"


def _required_by_loss(run: RunConfig) -> Iterator[tuple[KeyPath, str, KeyPath, Kind, str]]:
    """Losses that compare several tokens per position need backends with top-k log-probabilities."""
    setting = f"the loss {run.loss_fn.name or run.algorithm.default_loss!r}"
    for name, model in models_of(run).items():
        if model.head == "tokens" and run.loss_fn.num_candidates:
            yield (name, "backend"), setting, (name,), Kind.POLICY, "topk_logprobs"


def _required_capabilities(run: RunConfig) -> Iterator[tuple[KeyPath, str, KeyPath, Kind, str]]:
    generation, generation_at = run.policy.generation, ("policy", "generation")
    for name, model in models_of(run).items():
        for batching in ("dynamic_batching", "sequence_packing"):
            if getattr(model, batching).enabled:
                yield (name, batching, "enabled"), "true", (name,), Kind.POLICY, batching
        if model.head == "scalar":
            yield (name, "head"), "scalar", (name,), Kind.POLICY, "scalar_head"
        if run.cluster.backend == "in_process":
            yield ("cluster", "backend"), "in_process", (name,), Kind.POLICY, "in_process"
    if run.cluster.backend == "in_process":
        at = ("cluster", "backend")
        if generation is not None:
            yield at, "in_process", generation_at, Kind.GENERATION, "in_process"
    if generation is not None and generation.top_p < 1.0:
        yield (*generation_at, "top_p"), f"{generation.top_p}", generation_at, Kind.GENERATION, "top_p"
    if generation is not None and generation.top_k is not None:
        yield (*generation_at, "top_k"), f"{generation.top_k}", generation_at, Kind.GENERATION, "top_k"


def _unmet_requirements(run: RunConfig, layout: ConfigLayout) -> Iterator[Finding]:
    """Missing optional requirements of components; disabled loggers are skipped."""
    for path, section in layout.sections.items():
        component = section.component
        if component is None or section.kind is None:
            continue
        if section.kind is Kind.LOGGER and not run.logger.loggers[str(path[-1])].enabled:
            continue
        problem = unmet_needs(component.needs)
        if problem is not None:
            remedy = f": {component.install}" if component.install else ""
            yield path, f"the {section.kind.label} {component.name!r} cannot run here: {problem}{remedy}"
