"""Components: what their sections check, the capabilities that the config requires, and optional requirements."""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.config.diagnostics import Problem
from rl_core.config.schema import GenerationConfig, PolicyConfig
from rl_core.config.section import ComponentSection
from rl_core.config.source_tree import KeyPath, dotted
from rl_core.errors import PluginError
from rl_core.plugins.capabilities import Capability
from rl_core.plugins.component import Component, Kind, is_path
from rl_core.plugins.record import Status
from rl_core.plugins.requirements import unmet_needs
from rl_train.config.config_layout import SectionSchema
from rl_train.config.rules.models import MODELS, each_engine, each_model
from rl_train.config.rules.rule import TRAINING, CheckedConfig, Use, rule
from rl_train.config.schema import LoggerConfig, RunConfig
from rl_train.config.slots import SLOTS, sections_at

_ONLY_FOR_TRAINING = (Kind.ALGORITHM, Kind.LOSS, Kind.LOGGER)


def sections_of(run: RunConfig, *, trains: bool = True) -> Iterator[tuple[KeyPath, ComponentSection]]:
    """The sections of components, each with its key, without those of the algorithm and of disabled loggers.

    Args:
        run: The sections.
        trains: Whether to include those that only concern training.
    """
    for slot in SLOTS:
        if slot.kind is not Kind.ALGORITHM and (trains or slot.kind not in _ONLY_FOR_TRAINING):
            for path, section in sections_at(run, slot.path):
                if not isinstance(section, LoggerConfig) or section.enabled:
                    yield path, section


def each_section(config: CheckedConfig) -> Iterator[tuple[KeyPath, ComponentSection]]:
    """The sections of the components that a config is used with."""
    yield from sections_of(config.run, trains=config.use in TRAINING)


@rule("algorithm", "loss_fn", "policy", "value", "data", "env", applies_to=TRAINING)
def algorithm_supports_the_other_sections(config: CheckedConfig) -> Iterator[Problem]:
    """The algorithm's own checks: `conflicts` of its section."""
    for path, message in config.run.algorithm.conflicts(config.run):
        yield Problem(path, message)


@rule("loss_fn", *MODELS, "policy.generation", "data", "env", "logger", each=each_section)
def component_supports_the_other_sections(config: CheckedConfig, path: KeyPath, section: ComponentSection) -> Iterator[Problem]:
    """The own checks of backends, datasets, environments, losses and loggers: `conflicts` of their sections."""
    for inner, message in section.conflicts(config.run):
        yield Problem((*path, *inner), message)


@rule(*(f"{name}.backend" for name in MODELS), "cluster.backend", each=each_model)
def policy_backend_has_the_capabilities(config: CheckedConfig, name: str, model: PolicyConfig) -> Iterator[Problem]:
    """The backend of a model supports its batching, its head and the cluster."""
    required: list[tuple[KeyPath, str, str]] = [
        ((name, batching, "enabled"), "true", batching)
        for batching in (Capability.DYNAMIC_BATCHING, Capability.SEQUENCE_PACKING)
        if getattr(model, batching).enabled
    ]
    if model.head == "scalar":
        required.append(((name, "head"), "scalar", Capability.SCALAR_HEAD))
    if config.run.cluster.backend == "in_process":
        required.append((("cluster", "backend"), "in_process", Capability.IN_PROCESS))
    elif (ranks := config.run.cluster.num_nodes * config.run.cluster.workers_per_node) > 1:
        required.append((("cluster",), f"a run with {ranks} ranks", Capability.MULTIPLE_RANKS))
    for key, setting, capability in required:
        yield from _lacks(config, key, setting, (name,), Kind.POLICY, model.backend, capability)


@rule("policy.generation", "cluster.backend", each=each_engine)
def generation_backend_has_the_capabilities(config: CheckedConfig, generation: GenerationConfig) -> Iterator[Problem]:
    """The engine supports its sampling filters and the cluster."""
    at = ("policy", "generation")
    required: list[tuple[KeyPath, str, str]] = []
    if config.run.cluster.backend == "in_process":
        required.append((("cluster", "backend"), "in_process", Capability.IN_PROCESS))
    if generation.top_p < 1.0:
        required.append(((*at, "top_p"), f"{generation.top_p}", Capability.TOP_P))
    if generation.top_k is not None:
        required.append(((*at, "top_k"), f"{generation.top_k}", Capability.TOP_K))
    for key, setting, capability in required:
        yield from _lacks(config, key, setting, at, Kind.GENERATION, generation.backend, capability)


@rule("loss_fn", *(f"{name}.backend" for name in MODELS), applies_to=TRAINING, each=each_model)
def policy_backend_has_the_logprobs_of_the_loss(config: CheckedConfig, name: str, model: PolicyConfig) -> Iterator[Problem]:
    """With a loss that compares several tokens per position, backends support top-k log-probabilities."""
    run = config.run
    if model.head == "tokens" and run.loss_fn.num_candidates:
        setting = f"the loss {run.loss_fn.name or run.algorithm.default_loss!r}"
        yield from _lacks(config, (name, "backend"), setting, (name,), Kind.POLICY, model.backend, Capability.TOPK_LOGPROBS)


@rule("algorithm", "policy.backend", "policy.generation.backend", applies_to=TRAINING)
def backends_have_what_the_algorithm_requires(config: CheckedConfig) -> Iterator[Problem]:
    """The policy or the engine has each capability that the section of the algorithm requires."""
    run, generation = config.run, config.run.policy.generation
    backends = [(Kind.POLICY, run.policy.backend), *([(Kind.GENERATION, generation.backend)] if generation else [])]
    if not run.algorithm.requires or any(backend not in config.registry.names(kind) for kind, backend in backends):
        return
    declared = {each for kind, backend in backends for each in config.registry.find(kind, backend).capabilities}
    missing = [repr(name) for name in run.algorithm.requires if name not in declared]
    if missing:
        having = " and ".join(f"the {kind.label} {backend!r}" for kind, backend in backends)
        yield Problem(
            ("policy", "backend"),
            f"{run.algorithm_name} requires the capability {' and '.join(missing)}, but {having} do not have it. "
            "Choose backends that declare it, or another algorithm.",
        )


def _lacks(
    config: CheckedConfig, key: KeyPath, setting: str, section: KeyPath, kind: Kind, backend: str, capability: str
) -> Iterator[Problem]:
    # A backend given by its path declares its capabilities on its class, which only the run imports. A backend created in
    # Python may be unregistered.
    if is_path(backend) or backend not in config.registry.names(kind):
        return
    try:
        config.registry.find(kind, backend, requires=(capability,))
    except PluginError as error:
        yield Problem(key, f"{setting} is not supported by {dotted(section)}. {error}")


@rule("cluster")
def rl_core_has_its_requirements(config: CheckedConfig) -> Iterator[Problem]:
    """What rl-core requires, such as Ray, is installed in a release that it allows."""
    for plugin in config.registry.manager.plugins:
        if plugin.distribution == "rl-core" and plugin.status is Status.MISSING:
            yield Problem(("cluster",), f"{plugin.label} cannot be used: {plugin.reason}. Run: rlcore doctor {plugin.name}")


def each_component(config: CheckedConfig) -> Iterator[tuple[KeyPath, SectionSchema, Component]]:
    """The components that a config is used with."""
    for path, part in () if config.layout is None else config.layout.sections.items():
        is_used = config.use is Use.TRAIN or part.kind not in _ONLY_FOR_TRAINING
        is_disabled = part.kind is Kind.LOGGER and not config.run.logger.loggers[str(path[-1])].enabled
        if part.component is not None and is_used and not is_disabled:
            yield path, part, part.component


@rule("every component", each=each_component)
def optional_requirements_are_installed(
    config: CheckedConfig, path: KeyPath, part: SectionSchema, component: Component
) -> Iterator[Problem]:
    """What a component needs in addition to its distribution is installed. Disabled loggers need nothing."""
    if part.kind is Kind.ENVIRONMENT and config.run.env[str(path[-1])].python is not None:
        return  # its interpreter is asked before a run starts
    problem = unmet_needs(component.needs)
    if problem is not None and part.kind is not None:
        remedy = f": {component.install}" if component.install else ""
        yield Problem(path, f"the {part.kind.label} {component.name!r} cannot run here: {problem}{remedy}")
