"""Rules about components: sections that are needed or ignored, their own checks, capabilities and optional requirements."""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.config.diagnostics import KeyPath, Problem, dotted
from rl_core.config.schema import GenerationConfig, PolicyConfig
from rl_core.config.section import ComponentSection
from rl_core.plugins.component import Capability, Component, Kind, Status, did_you_mean, is_path
from rl_core.plugins.import_path import missing_target
from rl_core.plugins.requirements import unmet_needs
from rl_train.config.rules.models import MODELS, each_engine, each_model, lacks_capability, model_path, role_of
from rl_train.config.rules.rule import TRAIN_ONLY, TRAINING, CheckedConfig, Use, rule
from rl_train.config.schema import LoggerConfig, RolloutConfig, RunConfig
from rl_train.config.slots import COMPANIONS, SLOTS, SectionSchema, sections_at

_WHY_AN_ENGINE = {
    Use.EVAL: "An evaluation samples completions. Choose a generation `backend`, for example ++policy.generation.backend=hf.",
    Use.COMPARE: "Without it there is no engine to compare with the policy. Choose a generation `backend`, for example "
    "++policy.generation.backend=hf.",
    Use.SERVE: "Without it there is no engine. Choose a generation `backend`: ++policy.generation.backend=BACKEND.",
}
_PAIRS_ARE_NOT_SAMPLED = (
    "An evaluation samples answers to prompts, but {algorithm} uses preference pairs. The accuracy on held-out pairs is the "
    "metric `validation/accuracy` of the run."
)
_ROWS_ARE_NOT_SAMPLED = "An evaluation samples answers to prompts, but {algorithm} trains on given answers."
_SAMPLES_ELSEWHERE = (
    " To sample from the trained policy, name a config with prompts and an environment: "
    "`rlcore eval CONFIG_WITH_PROMPTS_AND_ENV --checkpoint RUN`."
)


def validates(run: RunConfig) -> bool:
    """Whether validation is enabled."""
    algorithm = run.algorithm
    has_period = algorithm.val_period > 0 or any(section.val_period for section in run.data.validation_sets.values())
    return has_period or algorithm.val_at_start or algorithm.val_at_end


@rule("algorithm", "policy.generation", applies_to=frozenset({Use.TRAIN, *_WHY_AN_ENGINE}))
def what_samples_has_an_engine(config: CheckedConfig) -> Iterator[Problem]:
    """A run whose algorithm samples, an evaluation and a server have a section `policy.generation`."""
    run = config.run
    if config.samples and run.policy.generation is None:
        trains = f"{run.algorithm_name} samples from the policy. Choose a generation `backend`."
        reason = _WHY_AN_ENGINE.get(config.use, trains)
        if config.use is Use.EVAL and not run.algorithm.runtime_needs.samples:
            why = _PAIRS_ARE_NOT_SAMPLED if run.algorithm.needs_preferences else _ROWS_ARE_NOT_SAMPLED
            reason = why.format(algorithm=run.algorithm_name)
            reason += _SAMPLES_ELSEWHERE if run.algorithm.head == "tokens" else ""
        yield Problem(("policy", "generation"), f"is required. {reason}", is_missing=True)


@rule("algorithm", "env", "policy.generation", applies_to=frozenset({Use.TRAIN, Use.EVAL}))
def samples_are_scored(config: CheckedConfig) -> Iterator[Problem]:
    """A run that trains on rewards and an evaluation have a section `env`."""
    run = config.run
    if config.use is Use.EVAL:
        # Without sampling in training, the missing engine is reported, and another config is the remedy.
        if not run.env and (run.algorithm.runtime_needs.samples or run.policy.generation is not None):
            yield Problem(
                ("env",),
                "is required. An evaluation scores completions with an environment. Add one, such as `math:`, or "
                "++env.math.num_workers=1.",
                is_missing=True,
            )
    elif run.algorithm.runtime_needs.samples and run.algorithm.needs_rewards and not run.env:
        aim = "trains on" if run.algorithm.needs_generation else "validates with"
        yield Problem(
            ("env",),
            f"is required. {run.algorithm_name} {aim} rewards from an environment. Add one, such as `math:`.",
            is_missing=True,
        )


@rule("algorithm", "data", applies_to=TRAIN_ONLY)
def training_has_data(config: CheckedConfig) -> Iterator[Problem]:
    """An algorithm that trains on data has training data."""
    run = config.run
    if run.algorithm.runtime_needs.training_data and not run.data.has_training_data:
        yield Problem(
            ("data", "train"),
            f"is required. {run.algorithm_name} needs training data. Set `dataset_name`, or `data.train_data_path`.",
            is_missing=True,
        )


@rule("algorithm", "data", applies_to=TRAIN_ONLY)
def validation_has_data(config: CheckedConfig) -> Iterator[Problem]:
    """A run that validates has validation data."""
    run = config.run
    if validates(run) and not run.data.has_validation_data:
        setting = next(key for key in ("val_period", "val_at_start", "val_at_end") if getattr(run.algorithm, key))
        yield Problem(
            (run.algorithm_name, setting),
            "enables validation, but there is no validation data: set data.validation or data.split, or disable validation.",
        )


@rule("algorithm", "data.sampler", "env", "rollout.max_staleness", applies_to=TRAIN_ONLY)
def prompt_sampler_has_prompts_and_rewards(config: CheckedConfig) -> Iterator[Problem]:
    """A prompt sampler is only set for an algorithm that samples, and for one that scores if it needs rewards."""
    yield from sampler_problems(config.run)


def sampler_problems(run: RunConfig) -> Iterator[Problem]:
    """What makes `data.sampler` impossible or without effect; a Python trainer only knows its data when it trains."""
    sampler, at = run.data.sampler, ("data", "sampler")
    if sampler is None:
        return
    if run.algorithm.runtime_needs.rollouts is None:
        yield Problem(
            at,
            f"{run.algorithm_name} does not sample prompts, so the section has no effect: remove it.",
        )
    elif sampler.uses_rewards and not run.algorithm.runtime_needs.rollouts.rewarded and not run.env:
        yield Problem(
            (*at, "name"),
            f"{sampler.name} chooses prompts by their rewards, but nothing scores the rollouts of {run.algorithm_name}: add a "
            "section `env`, or use a sampler without rewards, such as stages with at_steps.",
        )
    if sampler.delay is not None and sampler.delay < run.rollout.max_staleness:
        yield Problem(
            (*at, "delay"),
            f"is {sampler.delay}, but rewards may be known rollout.max_staleness ({run.rollout.max_staleness}) steps later: "
            "raise delay, or remove it.",
        )
    if is_path(sampler.name) and (problem := missing_target(sampler.name)) is not None:
        yield Problem((*at, "name"), f"cannot import {sampler.name!r}: {problem}")


@rule("algorithm", "env", applies_to=TRAIN_ONLY)
def only_what_samples_has_environments(config: CheckedConfig) -> Iterator[Problem]:
    """A run that never samples has no section `env`."""
    if config.run.env:
        yield from _without_effect(config, ("env",), "does not sample or score, so", "env.<task>")


@rule("algorithm", "rollout", applies_to=TRAIN_ONLY)
def only_what_samples_has_rollouts(config: CheckedConfig) -> Iterator[Problem]:
    """A run that never samples has no section `rollout`."""
    if config.run.rollout != RolloutConfig():
        yield from _without_effect(config, ("rollout",), "does not sample, so", "rollout.retries")


@rule("algorithm", "policy.generation", applies_to=TRAIN_ONLY)
def only_what_samples_has_an_engine(config: CheckedConfig) -> Iterator[Problem]:
    """A run that never samples has no section `policy.generation`."""
    if config.run.policy.generation is not None:
        reason = "does not sample, so no engine is started and"
        yield from _without_effect(config, ("policy", "generation"), reason, "policy.generation.backend")


def _without_effect(config: CheckedConfig, path: tuple[str, ...], reason: str, key: str) -> Iterator[Problem]:
    if not config.run.algorithm.runtime_needs.samples:
        yield Problem(
            path,
            f"{config.run.algorithm_name} {reason} the section has no effect. Remove the section, or set it in the command "
            f"that uses it (`rlcore eval config.yaml ++{key}=...`).",
        )


@rule("algorithm", *COMPANIONS, applies_to=TRAINING, each=lambda _: [(name,) for name in COMPANIONS])
def companions_are_those_of_the_algorithm(config: CheckedConfig, companion: str) -> Iterator[Problem]:
    """A value model and a teacher are configured if the algorithm uses them, and only then."""
    run, role = config.run, role_of(companion)
    is_used, is_configured = role in run.algorithm.runtime_needs.companions, bool(getattr(run, companion))
    if is_configured and not is_used:
        yield Problem((companion,), f"{run.algorithm_name} does not use a {role}: remove the section.")
    elif is_used and not is_configured and companion == role and not (role == "teacher" and run.teachers):
        yield Problem(
            (companion,),
            f"is required. {run.algorithm_name} needs a {role} model. Set its `backend` and `model_name`.",
            is_missing=True,
        )


@rule("teacher", "teachers", "env", applies_to=TRAINING)
def each_task_has_a_teacher(config: CheckedConfig) -> Iterator[Problem]:
    """Teachers of tasks replace the only teacher. Each task of `env` has one, and each of them has a task."""
    run, at = config.run, ("teachers",)
    if run.teachers and run.teacher is not None:
        yield Problem(at, "`teacher` scores all rows, and `teachers.<task>` those of one task: remove one of the two.")
    elif run.teachers and run.env:
        for task in run.env.keys() - run.teachers.keys():
            meant = did_you_mean(task, [name for name in run.teachers if name not in run.env])
            yield Problem(at, f"no teacher scores the rows of the task {task!r}.{meant} Add a section teachers.{task}.")
        for task in run.teachers.keys() - run.env.keys():
            meant = did_you_mean(task, list(run.env))
            yield Problem((*at, task), f"`env` has no task {task!r}.{meant} Tasks in `env`: {', '.join(run.env)}.")


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
    path = model_path(name)
    required: list[tuple[KeyPath, str, str]] = [
        ((*path, batching, "enabled"), "true", batching)
        for batching in (Capability.DYNAMIC_BATCHING, Capability.SEQUENCE_PACKING)
        if getattr(model, batching).enabled
    ]
    if model.head == "scalar":
        required.append(((*path, "head"), "scalar", Capability.SCALAR_HEAD))
    if config.run.cluster.backend == "in_process":
        required.append((("cluster", "backend"), "in_process", Capability.IN_PROCESS))
    elif (ranks := config.run.cluster.num_nodes * config.run.cluster.workers_per_node) > 1:
        required.append((("cluster",), f"a run with {ranks} ranks", Capability.MULTIPLE_RANKS))
    for key, setting, capability in required:
        yield from _lacks(config, key, setting, path, Kind.POLICY, model.backend, capability)


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
        path = model_path(name)
        yield from _lacks(config, (*path, "backend"), setting, path, Kind.POLICY, model.backend, Capability.TOPK_LOGPROBS)


@rule("loss_fn", "policy", applies_to=TRAINING)
def policy_has_the_reference_of_the_loss(config: CheckedConfig) -> Iterator[Problem]:
    """With a loss that compares the policy with a reference policy, the backend has one."""
    loss, reason = config.run.loss_fn, config.run.policy.missing_reference
    if loss.needs_reference and reason is not None:
        yield Problem(
            ("loss_fn",),
            f"the loss {loss.name or config.run.algorithm.default_loss!r} compares the policy with a reference policy, but "
            f"there is none: {reason}. Use a loss without a KL penalty (loss_fn.reference_policy_kl_penalty: 0), or a policy "
            "with a reference.",
        )


@rule("algorithm", "policy", applies_to=TRAINING)
def policy_has_the_average_of_the_teacher(config: CheckedConfig) -> Iterator[Problem]:
    """If the teacher is the moving average of the policy's weights, the backend keeps one."""
    run, reason = config.run, config.run.policy.missing_average
    if run.algorithm.runtime_needs.teacher_decay is not None and reason is not None:
        yield Problem(
            ("policy", "backend"),
            f"the teacher of {run.algorithm_name} is the moving average of the policy's weights, but {reason}. Use a backend "
            "with one, such as hf, or a frozen teacher.",
        )


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
    if (error := lacks_capability(config.registry, kind, backend, capability)) is not None:
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
