"""The pages from Python: `DPOTrainer(policy, cluster).train(dataset)` runs the page that `rlcore train` runs.

A trainer takes parts that the caller has made, puts what lies between them in place, and hands the Run to the algorithm's page.
It owns none of them: the caller shuts policy, engine, environments and cluster down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from rl_core.config.schema import (
    AlgorithmConfig,
    CheckpointingConfig,
    DataConfig,
    EnvironmentConfig,
    LossConfig,
    PolicyConfig,
    RunConfig,
)
from rl_core.config.source_tree import dotted
from rl_core.data.tokenizer import load_policy_tokenizer
from rl_core.dispatch.policy import DistributedPolicy
from rl_core.dispatch.worker_facade import WorkerFacade
from rl_core.errors import ConfigError
from rl_core.interfaces.environment import EnvironmentInterface
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.logger import Logger
from rl_core.interfaces.loss import LossFunction
from rl_core.interfaces.policy import ColocatablePolicyInterface
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_train.config.checks import section_conflicts
from rl_train.config.section_resolver import COMPANIONS
from rl_train.metrics.jsonl import JsonlLogger
from rl_train.runtime.build import DataLoaders, connect, refuse_other_tokenizers
from rl_train.runtime.python_data import read_given, section_from
from rl_train.runtime.run_folder import claim, start_in
from rl_train.runtime.workers import Builder, Workers

if TYPE_CHECKING:
    from rl_core.cluster.virtual_cluster import RayVirtualCluster

TASK = "default"


class Trainer:
    """An algorithm's page over parts that are there already.

    Args:
        policy: the model to train. One that was made without a cluster is spread over `cluster`, if that is given.
        cluster: where policy and engine run; None leaves them where they are.
        config: the algorithm's section, as its model or as a dict of its keys; its defaults by default.
        loss_fn: the loss, as an object or as a section `loss_fn`; the algorithm's own by default.
        generation: the engine that samples, for an algorithm that does.
        value: the critic (a model made with `head="scalar"`), for an algorithm that has one.
        teacher: who is learnt from, for an algorithm that has a teacher; it scores at the policy's temperature.
        environments: what scores: one environment, or several by task name.
        tokenizer: the policy's; read from its `model_name` by default.
        folder: where metrics.jsonl, rollouts and checkpoints are written; None keeps nothing.
        checkpointing: the section of that name; none are written by default.
        loggers: where metrics go besides.

    Raises:
        ConfigError: the parts or sections do not fit together.
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
        value: DistributedPolicy | None = None,
        teacher: DistributedPolicy | None = None,
        environments: EnvironmentInterface | Mapping[str, EnvironmentInterface] | None = None,
        tokenizer: Any = None,
        folder: str | Path | None = None,
        checkpointing: CheckpointingConfig | Mapping[str, Any] | None = None,
        loggers: Sequence[Logger] = (),
    ) -> None:
        self.policy, self.generation, self.cluster, self.folder, self.loggers = policy, generation, cluster, folder, loggers
        self.value, self.teacher = value, teacher
        self._registry = Registry(discover())
        self._environments = (
            {TASK: environments} if isinstance(environments, EnvironmentInterface) else dict(environments or {})
        )
        self._loss_fn, loss_section = self._loss(loss_fn)
        self.config = self._run_config(config, loss_section, checkpointing)
        if self.config.checkpointing.enabled and folder is None:
            raise ConfigError("checkpointing needs a place to write to: give the trainer a `folder`")
        self._refuse_conflicts()
        if tokenizer is not None and self.config.policy.tokenizer.chat_template_kwargs:
            raise ConfigError(
                "policy.tokenizer.chat_template_kwargs has no effect on a tokenizer that is passed to the trainer: set "
                "tokenizer.chat_template = rl_core.data.tokenizer.with_template_kwargs(tokenizer.chat_template, {...}) instead"
            )
        self._tokenizer = tokenizer or load_policy_tokenizer(self.config.policy)
        refuse_other_tokenizers(self.config, self._tokenizer)
        parts: tuple[Any, ...] = (policy, generation, value, teacher)
        for part in parts:
            if cluster is not None and isinstance(part, WorkerFacade) and part.is_in_process:
                if isinstance(part, DistributedPolicy) and part.weight_version > 0:
                    raise ConfigError(
                        f"{part.config.model_name} was trained in this process, and spreading it over the cluster would lose "
                        "that. Make it with `cluster=...`, or save a checkpoint and make one from it."
                    )
                part.spread_over(cluster)

    def train(self, dataset: Any, validation: Any = None) -> list[dict[str, float]]:
        """Train to the config's last step.

        Args:
            dataset: what a config's `data` can name, and rows: a path (JSON lines, parquet, a folder), the name of a dataset of
                the hub, a list of dicts, a `datasets.Dataset`, records, or a section; see `given_data.read_given`.
            validation: the held-out data in the same forms, where the config asks for validation.

        Returns:
            The metrics of each step, as metrics.jsonl has them; with a validation before the first step, that is the first.

        Raises:
            DataError: there is no such data, or a row does not have the algorithm's form.
            ConfigError: validation is asked for, and there is no data for it.
        """
        algorithm = self.config.algorithm
        asks = algorithm.val_period > 0 or algorithm.val_at_start or algorithm.val_at_end
        data, train, held_out = read_given(
            dataset, validation if asks else None, self._registry, wants_pairs=algorithm.needs_preferences
        )
        if asks and held_out is None:
            raise ConfigError(
                "The config asks for validation (val_period, val_at_start or val_at_end): give `validation=` data."
            )
        config = self.config.model_copy(update={"data": data})
        loaders = DataLoaders(config, self._tokenizer, train=train, validation=held_out if asks else None)
        history: list[dict[str, float]] = []
        with ExitStack() as exits:
            folder = Path(self.folder) if self.folder is not None else Path(exits.enter_context(TemporaryDirectory()))
            claim(start_in(folder), config.checkpointing, exits)
            builder = Builder(run=loaders.settled(config), registry=self._registry, exits=exits, cluster=self.cluster)
            run = connect(
                builder,
                Workers(
                    policy=self.policy,
                    generation=self.generation,
                    environments=self._environments,
                    companions={name: model for name in COMPANIONS if (model := getattr(self, name)) is not None},
                ),
                loaders,
                loss_fn=self._loss_fn,
                tokenizer=self._tokenizer,
                resolved=config.model_dump(mode="json", serialize_as_any=True),
                folder=folder,
            )
            if run.checkpoints is not None:
                # Of an earlier call of `train` with this folder: this one counts its steps from 1 again.
                run.checkpoints.store.set_aside(after=0)
            run.loggers = [JsonlLogger(folder), *run.loggers, *self.loggers]
            run.on_step = lambda step, metrics: history.append({"step": step, **metrics})
            self._registry.find("algorithm", self.algorithm).load()(algorithm, run)
        return history

    def _loss(self, given: Any) -> tuple[LossFunction, LossConfig]:
        if isinstance(given, LossFunction):
            section = getattr(given, "config", None)
            return given, section if isinstance(section, LossConfig) else LossConfig()
        algorithm = self._registry.find("algorithm", self.algorithm).load_config()
        assert algorithm is not None
        assert issubclass(algorithm, AlgorithmConfig)
        named = given.get("name") if isinstance(given, Mapping) else getattr(given, "name", None)
        name = named or algorithm.default_loss
        if name is None:
            raise ConfigError(f"{self.algorithm} has no default loss: give {type(self).__name__} `loss_fn`.")
        component = self._registry.find("loss", name)
        section = (
            given if isinstance(given, LossConfig) else section_from(component.load_config() or LossConfig, given, "loss_fn")
        )
        loss_fn: LossFunction = component.load()(section)
        return loss_fn, section

    def _run_config(self, config: Any, loss_section: LossConfig, checkpointing: Any) -> RunConfig:
        model = self._registry.find("algorithm", self.algorithm).load_config()
        policy = getattr(self.policy, "config", None)
        if not isinstance(policy, PolicyConfig):
            raise ConfigError(
                f"{type(self.policy).__name__} has no `config` of the kind PolicyConfig, which says how long its rows may be "
                "and which tokenizer it has. Give it one."
            )
        # What the policy was made with says how it scores; who samples is `generation` alone.
        policy = policy.model_copy(update={"generation": getattr(self.generation, "config", None)})
        return RunConfig(
            algorithm_name=self.algorithm,
            algorithm=config if isinstance(config, AlgorithmConfig) else section_from(model, config, self.algorithm),
            loss_fn=loss_section,
            policy=policy,
            value=_companion_section(self.value),
            teacher=_companion_section(self.teacher),
            data=DataConfig(),
            env={task: EnvironmentConfig() for task in self._environments},
            checkpointing=section_from(CheckpointingConfig, checkpointing or {"enabled": False}, "checkpointing"),
        )

    def _refuse_conflicts(self) -> None:
        algorithm = self.config.algorithm
        if algorithm.needs_generation and (self.generation is None or (algorithm.needs_rewards and not self._environments)):
            raise ConfigError(
                f"{self.algorithm} samples and scores: give {type(self).__name__} `generation` and `environments`."
            )
        self._refuse_teacher()
        if "value" in algorithm.runtime_needs.companions and self.value is None:
            raise ConfigError(f"{self.algorithm} has a critic: give {type(self).__name__} `value`, made with head='scalar'.")
        self._refuse_other_temperatures()
        if found := [f"{dotted(path)}: {message}" for path, message in section_conflicts(self.config, self._registry)]:
            raise ConfigError("\n".join(found))

    def _refuse_teacher(self) -> None:
        wanted = "teacher" in self.config.algorithm.runtime_needs.companions
        if wanted != (self.teacher is not None):
            raise ConfigError(f"{self.algorithm} {'learns from a teacher: give it' if wanted else 'has no use for'} `teacher`.")

    def _refuse_other_temperatures(self) -> None:
        """In a config file one key sets the temperature of engine, policy and teacher; here each was made by itself."""
        needed = self.config.scoring_temperature
        why = (
            f"`generation` samples at temperature {needed:g}"
            if self.config.algorithm.needs_generation
            else f"{self.algorithm} does not sample, so it trains at temperature 1"
        )
        for name, model in (("policy", self.policy), ("teacher", self.teacher)):
            section = getattr(model, "config", None)
            if isinstance(section, PolicyConfig) and section.head == "tokens" and section.scoring_temperature != needed:
                raise ConfigError(
                    f"{why}, and the {name} scores tokens at {section.scoring_temperature:g}: every log-probability would be "
                    f"that of another distribution. Make the {name} with `generation={{'temperature': {needed:g}}}`."
                )


def _companion_section(model: DistributedPolicy | None) -> PolicyConfig | None:
    """The section of a model beside the policy; as in a config file it samples nothing."""
    section = getattr(model, "config", None)
    return section.model_copy(update={"generation": None}) if isinstance(section, PolicyConfig) else None


class DPOTrainer(Trainer):
    """Trains on pairs of a better and a worse answer: records of `prompt`, `chosen`, `rejected`, each a text or messages."""

    algorithm = "dpo"


class RewardModelTrainer(Trainer):
    """Learns to score from pairs, as for DPO, with `margin` where one is known; the policy is made with `head="scalar"`."""

    algorithm = "rm"


class SFTTrainer(Trainer):
    """Trains on conversations: records of `messages` that end with the assistant's."""

    algorithm = "sft"


class GRPOTrainer(Trainer):
    """Trains on rewards: records of `messages` and `extra_env_info`; needs `generation` and `environments`."""

    algorithm = "grpo"


class PPOTrainer(Trainer):
    """Trains on rewards with a critic: records as for GRPO; needs `value`, `generation` and `environments`."""

    algorithm = "ppo"


class DistillationTrainer(Trainer):
    """Learns from a teacher's view of the policy's own answers: records of `messages`; needs `generation` and `teacher`."""

    algorithm = "distillation"
