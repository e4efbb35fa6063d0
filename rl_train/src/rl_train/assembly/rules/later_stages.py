"""Classes that a config names: they can be imported, and keep the contracts of their kinds.

A Python trainer checks the contracts of its objects instead.

Models: their files exist, the backends can load them, and they have positions for the longest rows.

The data of a run: it can be read and tokenized, its length fits the schedules, and reward functions can score it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from rl_core.config.diagnostics import KeyPath, Problem
from rl_core.config.schema import EnvironmentConfig, GenerationConfig, PolicyConfig
from rl_core.config.section import ComponentSection
from rl_core.errors import UserError
from rl_core.interfaces.policy import LossFunction
from rl_core.plugins.component import Component, Kind, is_path
from rl_core.plugins.import_path import missing_target
from rl_train.agents.driver import accepted_arguments
from rl_train.assembly.checks import (
    check_reward_functions,
    length_problems,
    refuse_other_end_tokens,
    refuse_other_tokenizers,
    tensor_problems,
    tokenizer_key,
    tokenizer_problems,
    tokenizer_warnings,
)
from rl_train.assembly.contracts import (
    CONTRACTS,
    EVALUATION_CONTRACTS,
    MODEL_ARGUMENTS,
    capabilities_of,
    model_contracts,
)
from rl_train.assembly.error_locations import problem_in_section
from rl_train.assembly.rules.run_facts import RunFacts
from rl_train.config.rules.components import each_component, each_section, sampler_problems
from rl_train.config.rules.models import MODELS, each_engine, each_interpreter, each_model, model_path, models_of, role_of
from rl_train.config.rules.rollouts import declares_own_weights, each_task, too_few_turns, unverified_weights
from rl_train.config.rules.rule import CONFIG_FILE, TRAIN_ONLY, TRAINING, Stage, UnavailableError, Use, rule
from rl_train.config.rules.run import schedule_problems, schedule_warnings
from rl_train.config.slots import SectionSchema
from rl_train.pools.component_probe import check_environment_class
from rl_train.pools.elsewhere import agent_signature, check_backend_elsewhere, environment_elsewhere
from rl_train.rollouts.teacher_rows import TeacherPrompts

_FILES = tuple(f"{name}.{key}" for name in MODELS for key in ("model_name", "tokenizer.name"))
_SCHEDULES = ("data", "algorithm", "policy.scheduler", "value.scheduler", "policy.train_global_batch_size", "cluster")


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
    contract = replace(contracts[role_of(name)], arguments=(*MODEL_ARGUMENTS, *named))
    if (problem := contract.problem(config.load(Kind.POLICY, model.backend))) is not None:
        yield Problem((*model_path(name), "backend"), problem)


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


def _each_source(config: RunFacts) -> Iterator[tuple[KeyPath, str]]:
    """The first key of each model and tokenizer, and its name: one that several sections name is one mistake."""
    sources: dict[str, KeyPath] = {}
    for name, model in models_of(config.run).items():
        with suppress(UnavailableError):  # the name itself is invalid
            source = model.tokenizer.name or model.model_name
            sources.setdefault(source, (*model_path(name), *tokenizer_key(model).split(".")))
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
        if path == model_path(name):
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
    yield from length_problems(config.run, is_rotary=False) if config.starts_policy else ()


@rule(*_FILES, "policy.generation.model_name", stage=Stage.IMPORTED, warns=True)
def rows_fit_the_trained_positions(config: RunFacts) -> Iterator[Problem]:
    """A model with rotary embeddings was trained for the positions of the longest rows."""
    config.require_models()
    yield from length_problems(config.run, is_rotary=True) if config.starts_policy else ()


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


@rule("algorithm", "data.sampler", stage=Stage.DATA, applies_to=frozenset({Use.PYTHON}))
def prompt_sampler_of_a_trainer_has_prompts_and_rewards(config: RunFacts) -> Iterator[Problem]:
    """As `prompt_sampler_has_prompts_and_rewards`, for a Python trainer, whose data is passed when it trains."""
    yield from sampler_problems(config.run)


@rule("data", "policy", "algorithm", "env", stage=Stage.DATA, applies_to=TRAINING | {Use.EVAL})
def data_can_be_read(config: RunFacts) -> None:
    """All data can be read, and its first rows can be rendered and tokenized."""
    _ = config.loaders


@rule("algorithm", "data", "policy", "teacher", stage=Stage.DATA, applies_to=TRAINING)
def teacher_prompts_can_be_written(config: RunFacts) -> None:
    """The fields of the teacher's prompt are those of the first rows, and it leaves tokens for an answer."""
    prompts, loader = TeacherPrompts.of_run(config.run, config.tokenizer), config.loaders.prompts
    if prompts is not None and loader is not None:
        prompts.check([loader.dataset[number] for number in loader.next_rows(config.run.data.check_rows)])


@rule(*_SCHEDULES, stage=Stage.DATA, applies_to=TRAINING)
def schedules_last_until_the_end_of_the_data(config: RunFacts) -> Iterator[Problem]:
    """With a number of epochs, a learning-rate schedule is not certain to reach 0 before they end."""
    yield from schedule_problems(config.in_steps)


@rule(*_SCHEDULES, stage=Stage.DATA, applies_to=TRAINING, warns=True)
def schedules_fit_the_data(config: RunFacts) -> Iterator[Problem]:
    """A learning-rate schedule does not end before the run, and its warm-up does."""
    yield from schedule_warnings(config.in_steps)


@rule("env", "data", stage=Stage.DATA, each=each_task)
def reward_functions_score_the_first_row(config: RunFacts, task: str, section: EnvironmentConfig) -> None:
    """A reward function accepts the first row of its task and returns rewards, and weights have the names of rewards."""
    if not any(map(missing_target, getattr(section, "functions", {}).values())):  # those are reported already
        check_reward_functions(task, config.run, config.data.sources)
