"""Classes that a config names: they can be imported, and keep the contracts of their kinds.

A Python trainer checks the contracts of its objects instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rl_core.config.diagnostics import Problem
from rl_core.config.schema import EnvironmentConfig, GenerationConfig, PolicyConfig
from rl_core.config.source_tree import KeyPath
from rl_core.errors import UserError
from rl_core.interfaces.loss import LossFunction
from rl_core.plugins.component import Component, Kind, is_path
from rl_train.agents.driver import accepted_arguments
from rl_train.assembly.contracts import (
    CONTRACTS,
    EVALUATION_CONTRACTS,
    MODEL_ARGUMENTS,
    capabilities_of,
    model_contracts,
)
from rl_train.assembly.rules.run_facts import RunFacts
from rl_train.config.config_layout import SectionSchema
from rl_train.config.partial_sections import UnavailableError
from rl_train.config.rules.components import each_component
from rl_train.config.rules.environments import each_task, too_few_turns
from rl_train.config.rules.models import MODELS, each_engine, each_interpreter, each_model
from rl_train.config.rules.rule import CONFIG_FILE, TRAIN_ONLY, Stage, Use, rule
from rl_train.config.rules.sampling import declares_own_weights, unverified_weights
from rl_train.pools.component_probe import check_environment_class
from rl_train.pools.elsewhere import agent_signature, check_backend_elsewhere, environment_elsewhere


@rule("every component", stage=Stage.IMPORTED, each=each_component)
def components_can_be_imported(config: RunFacts, path: KeyPath, part: SectionSchema, component: Component) -> Iterator[Problem]:
    """The class or function of each component can be imported."""
    if path == ("policy",) and not config.starts_policy:
        return
    if part.kind is Kind.ENVIRONMENT and config.run.env[str(path[-1])].python is not None:
        return  # `environment_classes_keep_their_contract` asks its interpreter
    try:
        component.load()
    except UserError as error:
        yield Problem(path, str(error))


@rule("loss_fn", "algorithm", stage=Stage.IMPORTED, applies_to=TRAIN_ONLY)
def loss_can_be_created(config: RunFacts) -> None:
    """The class of the loss is a loss, and its constructor accepts the section."""
    config.load(Kind.LOSS, config.run.loss_fn.name or config.run.algorithm.default_loss or "")
    _ = config.loss_fn


def _loss_of(config: RunFacts) -> LossFunction | None:
    try:
        return config.loss_fn
    except UnavailableError:
        return None


@rule("algorithm", "loss_fn", *MODELS, stage=Stage.IMPORTED, applies_to=TRAIN_ONLY | {Use.EVAL}, each=each_model)
def policy_classes_keep_their_contract(config: RunFacts, name: str, model: PolicyConfig) -> Iterator[Problem]:
    """The class of a model has the base class, the methods and the constructor that the algorithm or an evaluation needs."""
    if not config.starts_policy:
        return
    named = () if name == "policy" else ("name",)
    contracts = model_contracts(config.run, _loss_of(config)) if config.use is Use.TRAIN else EVALUATION_CONTRACTS
    contract = replace(contracts[name], arguments=(*MODEL_ARGUMENTS, *named))
    if (problem := contract.problem(config.load(Kind.POLICY, model.backend))) is not None:
        yield Problem((name, "backend"), problem)


@rule("algorithm", "policy.generation.backend", stage=Stage.IMPORTED, applies_to=CONFIG_FILE)
def engine_class_keeps_its_contract(config: RunFacts) -> Iterator[Problem]:
    """The class of the engine has the base class, the methods and the constructor that a run needs."""
    engine, run = config.run.policy.generation, config.run
    if engine is None or not config.samples:
        return
    engine_class = config.load(Kind.GENERATION, engine.backend)
    contracts = model_contracts(run, None, own_weights=declares_own_weights(engine, config.registry))
    if (problem := replace(contracts["policy.generation"], arguments=MODEL_ARGUMENTS).problem(engine_class)) is not None:
        yield Problem(("policy", "generation", "backend"), problem)


@rule(*MODELS, stage=Stage.IMPORTED, applies_to=CONFIG_FILE, each=each_interpreter)
def interpreters_have_what_backends_require(
    config: RunFacts, path: KeyPath, kind: Kind, section: PolicyConfig | GenerationConfig
) -> Iterator[Problem]:
    """An interpreter that runs a backend's workers has the versions of the driver, and what the backend requires."""
    if not (config.starts_policy if kind is Kind.POLICY else config.samples):
        return
    assert section.python is not None
    try:
        check_backend_elsewhere(section.python, config.registry.find(kind, section.backend), config.registry)
    except UserError as error:
        yield Problem((*path, "python"), str(error))


@rule("algorithm", "policy.generation", stage=Stage.IMPORTED, each=each_engine)
def synced_weights_of_an_imported_engine_are_verified(config: RunFacts, generation: GenerationConfig) -> Iterator[Problem]:
    """As `synced_weights_are_verified`, for an engine given by its path, whose capabilities are declared on its class."""
    if is_path(generation.backend):
        config.load(Kind.GENERATION, generation.backend)
        if not declares_own_weights(generation, config.registry):
            capabilities = capabilities_of(config.registry.find(Kind.GENERATION, generation.backend))
            yield from unverified_weights(config, generation, capabilities)


@rule("env", stage=Stage.IMPORTED, applies_to=CONFIG_FILE, each=each_task)
def environment_classes_keep_their_contract(config: RunFacts, task: str, section: EnvironmentConfig) -> Iterator[Problem]:
    """The class of an environment has a method `step`, and a constructor that takes at most its section."""
    name = section.env_cls or section.name or task
    key = "env_cls" if section.env_cls is not None else "name"
    try:
        elsewhere = environment_elsewhere(task, section, config.registry)
        if elsewhere is not None:
            yield from too_few_turns(config.run, task, elsewhere.min_turns)
        else:
            check_environment_class(config.load(Kind.ENVIRONMENT, name), name)
        if section.agent is not None and section.python is not None:
            key = "agent"
            accepted_arguments(agent_signature(task, section, config.registry), task)
    except UserError as error:
        yield Problem(("env", task, "python" if section.python is not None else key), str(error))


@rule("logger", stage=Stage.IMPORTED, applies_to=TRAIN_ONLY)
def logger_classes_keep_their_contract(config: RunFacts) -> Iterator[Problem]:
    """The class of an enabled logger has the base class and the constructor that a run needs."""
    contract = replace(CONTRACTS[Kind.LOGGER], arguments=("config", "folder"))
    for name, logger in config.run.logger.loggers.items():
        if logger.enabled and (problem := contract.problem(config.load(Kind.LOGGER, name))) is not None:
            yield Problem(("logger", "loggers", name), problem)
