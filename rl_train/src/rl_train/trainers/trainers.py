"""Python trainers: `DPOTrainer(policy, cluster).train(dataset)` runs the same training function as `rlcore train`.

A trainer connects existing components and passes the Run to the algorithm. It does not own them: the caller shuts down policy,
engine, environments and cluster.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from rl_core.config.schema import EnvironmentConfig, PolicyConfig
from rl_core.dispatch.facades import PolicyFacade
from rl_core.dispatch.worker_facade import WorkerFacade
from rl_core.errors import ConfigError
from rl_core.interfaces.environment import EnvironmentInterface
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import ColocatablePolicyInterface, LossFunction
from rl_core.plugins.manager import PluginManager, discover
from rl_core.plugins.registry import Registry
from rl_train.assembly.checks import check_weights, is_conversational, try_functions
from rl_train.assembly.contracts import model_contracts
from rl_train.assembly.data import Source
from rl_train.assembly.error_locations import reporting_lines
from rl_train.assembly.parts import loss_of
from rl_train.assembly.preparation import Preparation, RunData
from rl_train.assembly.rules import check_before_start
from rl_train.assembly.rules.run_facts import RunFacts
from rl_train.assembly.run_assembly import assemble_run
from rl_train.assembly.workers import Builder, Workers
from rl_train.checkpoints.inputs import ComparedConfig
from rl_train.config.loader import load_config
from rl_train.config.rules.components import validates
from rl_train.config.rules.models import role_of
from rl_train.config.rules.rollouts import own_weights_refused
from rl_train.config.rules.rule import CheckedConfig, Stage, Use
from rl_train.config.schema import AlgorithmConfig, CheckpointingConfig, LossConfig, RolloutConfig, RunConfig
from rl_train.control import add_callbacks, call_event, keep_state, run_events
from rl_train.data.processors import load_policy_tokenizer, with_text_settings
from rl_train.metrics.jsonl import JsonlLogger
from rl_train.metrics.logger import Logger
from rl_train.rewards.environment import FunctionEnvironment, named_functions
from rl_train.run_folders.run_folder import lock_again_if_deleted, lock_run_folder, start_in
from rl_train.tools.task_tools import tools_of_instances
from rl_train.trainers.trainer_data import read_python_data

if TYPE_CHECKING:
    from rl_core.cluster.virtual_cluster import RayVirtualCluster

_log = logging.getLogger("rlcore")
TASK = "default"


class _PythonEnvironment(EnvironmentConfig):
    """The section of an environment that was passed in Python."""

    names: tuple[str, ...] = ()
    """Names of the rewards of its functions."""

    @property
    def reward_names(self) -> tuple[str, ...]:
        return self.names


class Trainer:
    """Runs an algorithm with existing components.

    Args:
        policy: the model to train. If it was created without a cluster, it is moved to `cluster`, if that is given.
        cluster: where policy and engine run; None leaves them unchanged.
        config: the algorithm's section, as its model or as a dict; its defaults if None.
        loss_fn: the loss, as an object or as a section `loss_fn`; the algorithm's default loss if None.
        generation: the engine, for algorithms that sample.
        value: the critic (a model with `head="scalar"`), for algorithms that have one.
        teacher: the teacher, for algorithms that have one; it scores at the policy's temperature. Or the teacher of each task.
        environments: one environment, or several by task name.
        reward_fns: functions that score completions, used instead of `environments`: one, several, or several by the names of
            their rewards; see `rl_train.rewards.functions`. They run in this process.
        reward_weights: weights of named rewards, 1 by default.
        tokenizer: the policy's tokenizer; loaded from its `model_name` by default.
        folder: folder of metrics.jsonl, rollouts and checkpoints; None writes to a temporary folder.
        checkpointing: the section `checkpointing`; disabled by default.
        rollout: the section `rollout`.
        loggers: additional loggers.
        callbacks: objects with run event hooks, which may control the run; see docs/callbacks.md.

    Raises:
        ConfigError: the components or sections are incompatible.
    """

    algorithm: ClassVar[str]

    def __init__(
        self,
        policy: ColocatablePolicyInterface,
        cluster: RayVirtualCluster | None = None,
        *,
        config: AlgorithmConfig | Mapping[str, Any] | None = None,
        loss_fn: LossFunction | LossConfig | Mapping[str, Any] | None = None,
        generation: GenerationInterface | None = None,
        value: PolicyFacade | None = None,
        teacher: PolicyFacade | Mapping[str, PolicyFacade] | None = None,
        environments: EnvironmentInterface | Mapping[str, EnvironmentInterface] | None = None,
        reward_fns: Callable[..., Any] | Sequence[Callable[..., Any]] | Mapping[str, Callable[..., Any]] | None = None,
        reward_weights: Mapping[str, float] | None = None,
        tokenizer: Any = None,
        folder: str | Path | None = None,
        checkpointing: CheckpointingConfig | Mapping[str, Any] | None = None,
        rollout: RolloutConfig | Mapping[str, Any] | None = None,
        loggers: Sequence[Logger] = (),
        callbacks: Sequence[Any] = (),
    ) -> None:
        self._callbacks = {f"callbacks[{number}]": callback for number, callback in enumerate(callbacks)}
        self._events = PluginManager()
        add_callbacks(self._events, self._callbacks)
        self.policy, self.generation, self.cluster, self.folder, self.loggers = policy, generation, cluster, folder, loggers
        teachers = dict(teacher) if isinstance(teacher, Mapping) else {}
        self.value, self.teacher = value, None if isinstance(teacher, Mapping) else teacher
        given = {"value": value, "teacher": self.teacher, **{f"teachers.{task}": model for task, model in teachers.items()}}
        self._companions = {name: model for name, model in given.items() if model is not None}
        self._registry = Registry(discover())
        if reward_fns is not None and environments is not None:
            raise ConfigError("`reward_fns` and `environments` both score completions: pass one of them.")
        self._functions = None if reward_fns is None else FunctionEnvironment(functions=named_functions(reward_fns))
        environments = environments or self._functions
        self._environments = (
            {TASK: environments} if isinstance(environments, EnvironmentInterface) else dict(environments or {})
        )
        self._reward_weights = dict(reward_weights or {})
        loss_section = _section_of_loss(loss_fn) if isinstance(loss_fn, LossFunction) else loss_fn
        self.config = self._load_config(config, loss_section, checkpointing, rollout)
        self._loss_fn = loss_fn if isinstance(loss_fn, LossFunction) else loss_of(self.config, self._registry)
        self._own_loss = type(loss_fn) if isinstance(loss_fn, LossFunction) else None
        if self.config.checkpointing.enabled and folder is None:
            raise ConfigError("checkpointing needs a folder: pass `folder` to the trainer")
        for problem in self._conflicts():
            raise ConfigError(problem)
        if tokenizer is not None and self.config.policy.tokenizer.chat_template_kwargs:
            raise ConfigError(
                "policy.tokenizer.chat_template_kwargs has no effect on a tokenizer that is passed to the trainer: set "
                "tokenizer.chat_template = rl_core.data.tokenizer.with_template_kwargs(tokenizer.chat_template, {...}) instead"
            )
        self._tokenizer = with_text_settings(tokenizer or load_policy_tokenizer(self.config.policy), self.config.policy)
        self._check(self.config, Stage.STATIC, Stage.IMPORTED)
        if cluster is not None:
            self._move_to(cluster)

    def train(self, dataset: Any, validation: Any = None) -> list[dict[str, float]]:
        """Train to the config's last step.

        Args:
            dataset: a path (JSON lines, parquet, a folder), the name of a dataset on the hub, a list of dicts, a
                `datasets.Dataset`, records, or a section; see `rl_train.trainers.trainer_data.read_python_data`.
            validation: the validation data in the same forms, if the config enables validation.

        Returns:
            The metrics of each step, as in metrics.jsonl; a validation before the first step comes first.

        Raises:
            DataError: the data does not exist, or a row does not have the form that the algorithm needs.
            ConfigError: validation is enabled, but there is no data for it.
        """
        algorithm, is_validated = self.config.algorithm, validates(self.config)
        kind, held_out = algorithm.record_kind, validation if is_validated else None
        data, train, held_out = read_python_data(
            dataset, held_out, self._registry, wants_pairs=kind == "pairs", wants_labels=kind == "unpaired"
        )
        if is_validated and held_out is None:
            raise ConfigError(
                "The config enables validation (val_period, val_at_start or val_at_end): pass data as `validation=`."
            )
        self._try_reward_functions(train)
        config = self.config.model_copy(update={"data": data, "algorithm": _for_dataset(algorithm, train)})
        tools = tools_of_instances(self._environments, self._tokenizer)
        sets = {"": held_out} if is_validated and held_out is not None else {}
        run_data = RunData(train=train, validation=sets)
        prepared = self._check(config, Stage.DATA, tools=tools, data=run_data)
        history: list[dict[str, float]] = []
        with ExitStack() as exits:
            folder = Path(self.folder) if self.folder is not None else Path(exits.enter_context(TemporaryDirectory()))
            start = lock_run_folder(start_in(folder), config.checkpointing, exits)
            builder = Builder(run=prepared.training_config, registry=self._registry, exits=exits, cluster=self.cluster)
            run = assemble_run(
                builder,
                Workers(
                    policy=self.policy,
                    generation=self.generation,
                    environments=self._environments,
                    companions=self._companions,
                ),
                prepared,
                loss_fn=self._loss_fn,
                compared=ComparedConfig(
                    values=config.model_dump(mode="json", serialize_as_any=True), algorithm=config.algorithm_name
                ),
                folder=folder,
            )
            if run.checkpoints is not None:
                lock_again_if_deleted(run.checkpoints.store, start, exits)
                # Checkpoints of an earlier call of `train` with this folder; this call counts its steps from 1 again.
                run.checkpoints.store.set_aside(after=0)
            run.loggers = [JsonlLogger(folder), *run.loggers, *self.loggers]
            keep_state(run, self._callbacks)
            exits.callback(run.control.undo, run)

            def on_step(step: int, metrics: Mapping[str, float]) -> None:
                history.append({"step": step, **metrics})
                returned = call_event(self._events, "rlcore_step_finished", run=run, step=step, metrics=metrics)
                run.control.apply(run, step, returned)

            run.on_step = on_step
            algorithm = self._registry.find("algorithm", self.algorithm).load()
            lines = reporting_lines(self._own_loss) if self._own_loss is not None else nullcontext()
            with lines, run_events(run, self._events):
                algorithm(run.config.algorithm, run)
        return history

    def _try_reward_functions(self, train: Source) -> None:
        if self._functions is not None:
            self._functions.as_messages = is_conversational(train.records)
            functions = self._functions.functions
            names = try_functions(functions, train, as_messages=self._functions.as_messages)
            check_weights(self._reward_weights, names | {function.name for function in functions})

    def _move_to(self, cluster: RayVirtualCluster) -> None:
        """Move the models and the engine that are in this process to a cluster."""
        components: tuple[Any, ...] = (self.policy, self.generation, *self._companions.values())
        for component in components:
            if not (isinstance(component, WorkerFacade) and component.is_in_process):
                continue
            if isinstance(component, PolicyFacade) and component.weight_version > 0:
                raise ConfigError(
                    f"{component.config.model_name} was trained in this process, and moving it to the cluster would lose its "
                    "training. Create it with `cluster=...`, or save a checkpoint and create it from that."
                )
            component.move_to_cluster(cluster)

    def _load_config(self, algorithm: Any, loss_fn: Any, checkpointing: Any, rollout: Any) -> RunConfig:
        """The config with the sections of the existing components; it has no data, which is passed to `train`."""
        policy = getattr(self.policy, "config", None)
        if not isinstance(policy, PolicyConfig):
            raise ConfigError(
                f"{type(self.policy).__name__} has no `config` of type PolicyConfig, which sets its tokenizer and maximum "
                "sequence length. Add one."
            )
        rewards = () if self._functions is None else tuple(function.name for function in self._functions.functions)
        environment = _PythonEnvironment(reward_weights=self._reward_weights, names=rewards)
        companions = {name: _companion_section(model) for name, model in self._companions.items()}
        sections = {
            self.algorithm: algorithm,
            "loss_fn": loss_fn,
            # The policy's own `generation` section only sets its scoring; samples come from the `generation` argument.
            "policy": policy.model_copy(update={"generation": getattr(self.generation, "config", None)}),
            **{name: section for name, section in companions.items() if "." not in name},
            "teachers": {name.partition(".")[2]: section for name, section in companions.items() if "." in name},
            "env": dict.fromkeys(self._environments, environment),
            "rollout": rollout,
            "checkpointing": checkpointing or {"enabled": False},
        }
        return load_config(sections, registry=self._registry, use=Use.PYTHON, stages=()).run

    def _conflicts(self) -> Iterator[str]:
        """What the given objects contradict, in words for arguments; the rules of a config name its keys instead."""
        algorithm, name, trainer = self.config.algorithm, self.algorithm, type(self).__name__
        companions = algorithm.runtime_needs.companions
        if algorithm.needs_generation and (self.generation is None or (algorithm.needs_rewards and not self._environments)):
            yield f"{name} samples and scores: pass `generation`, and `reward_fns` or `environments`, to {trainer}."
        rewards = algorithm.needs_rewards and algorithm.needs_generation
        if (self._functions is not None or self._reward_weights) and not rewards:
            yield f"{name} does not use rewards: remove `reward_fns` and `reward_weights`."
        if self.generation is not None and self.generation.has_own_weights:
            key = getattr(self.config.policy.generation, "weights_key", None)
            yield f"`generation`: {own_weights_refused(name, type(self.generation).__name__, key)}"
        has_teacher = "teacher" in map(role_of, self._companions)
        if ("teacher" in companions) != has_teacher:
            yield f"{name} {'does not use a teacher: remove' if has_teacher else 'needs a teacher: pass'} `teacher`."
        given = {"policy": self.policy, "policy.generation": self.generation, **self._companions}
        contracts = model_contracts(self.config, self._loss_fn)
        for key, model in given.items():
            contract = contracts[key if key == "policy.generation" else role_of(key)]
            if model is not None and (problem := contract.problem(type(model))) is not None:
                yield f"`{key.removeprefix('policy.')}`: {problem}"
        if "value" in companions and self.value is None:
            yield f"{name} has a critic: pass `value`, a model with head='scalar', to {trainer}."
        yield from self._other_temperatures()
        for task, environment in self._environments.items():
            allowed, needed = self.config.max_turns[task], environment.min_turns
            if allowed < needed:
                yield (
                    f"Rollouts have at most {allowed} turn(s), but {type(environment).__name__} needs {needed} to give a "
                    f"reward. Set `max_rollout_turns` of the algorithm to {needed} or more."
                )

    def _other_temperatures(self) -> Iterator[str]:
        """Models that score at another temperature. In a config file one key sets them all; here each model has its own."""
        needed = self.config.scoring_temperature
        why = (
            f"`generation` samples at temperature {needed:g}"
            if self.config.algorithm.needs_generation
            else f"{self.algorithm} does not sample, so it trains at temperature 1"
        )
        for name, model in {"policy": self.policy, **self._companions}.items():
            section = getattr(model, "config", None)
            if isinstance(section, PolicyConfig) and section.head == "tokens" and section.scoring_temperature != needed:
                yield (
                    f"{why}, but the {name} scores tokens at {section.scoring_temperature:g}: every log-probability would be "
                    f"from another distribution. Create the {name} with `generation={{'temperature': {needed:g}}}`."
                )

    def _check(self, config: RunConfig, *stages: Stage, **objects: Any) -> Preparation:
        """What a config and existing objects give a run, after checking the rules of some stages."""
        prepared = Preparation.of_objects(config, self._registry, tokenizer=self._tokenizer, **objects)
        checked = CheckedConfig(run=config, registry=self._registry, use=Use.PYTHON)
        check_before_start(RunFacts.of(checked, prepared=prepared), *stages)
        return prepared


def _for_dataset(algorithm: AlgorithmConfig, train: Source) -> AlgorithmConfig:
    """The section with a default number of records per step that the dataset has."""
    fitting = algorithm.for_records(max(1, len(train.records)))
    if fitting is not algorithm:
        key = str(algorithm.records_key)
        count, default = getattr(fitting, key), getattr(algorithm, key)
        _log.warning("each step uses all %d records of %s: the default %s is %d", count, train.name, key, default)
    return fitting


def _section_of_loss(loss_fn: LossFunction) -> LossConfig:
    section = getattr(loss_fn, "config", None)
    return section if isinstance(section, LossConfig) else LossConfig()


def _companion_section(model: PolicyFacade | None) -> PolicyConfig | None:
    """The section of a companion model, without `generation`, because only the policy samples."""
    section = getattr(model, "config", None)
    return section.model_copy(update={"generation": None}) if isinstance(section, PolicyConfig) else None


class DPOTrainer(Trainer):
    """Trains on preference pairs: records of `prompt`, `chosen` and `rejected`, each a text or messages."""

    algorithm = "dpo"


class KTOTrainer(Trainer):
    """Trains on labelled answers: records of `prompt`, `completion` and `label`; the first two are texts or messages."""

    algorithm = "kto"


class RewardModelTrainer(Trainer):
    """Trains a reward model on pairs as for DPO, with an optional `margin`; the policy must have `head="scalar"`."""

    algorithm = "rm"


class SFTTrainer(Trainer):
    """Trains on conversations: records of `messages` that end with an assistant message."""

    algorithm = "sft"


class GRPOTrainer(Trainer):
    """Trains on rewards: records of `messages` and `extra_env_info`; needs `generation`, and `reward_fns` or `environments`."""

    algorithm = "grpo"


class PPOTrainer(Trainer):
    """Trains on rewards with a critic: records as for GRPO; needs `value`, `generation`, and `reward_fns` or `environments`."""

    algorithm = "ppo"


class DistillationTrainer(Trainer):
    """Distills a teacher on the policy's own answers: records of `messages`; needs `generation` and `teacher`."""

    algorithm = "distillation"
