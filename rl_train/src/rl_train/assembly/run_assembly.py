"""Builds a Run and all of its components from a config; or only policy and engine, without training loop and run folder."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rl_core.config.section import Devices
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.process_seed import seed_process
from rl_core.dispatch.worker_facade import WorkerFacade
from rl_core.errors import ConfigError, DataError, UserError, with_key
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import ColocatablePolicyInterface, LossFunction
from rl_core.interfaces.records import plain_text
from rl_core.plugins.component import Capability, Kind
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_core.weights.adapters import LORA_B, is_adapter
from rl_core.weights.fingerprint import tensor_digests
from rl_core.weights.manifest import dtype_of
from rl_train.algorithms.estimators import make_estimator
from rl_train.algorithms.losses.distillation import DistillationLossFn
from rl_train.algorithms.policy_configs import GRPOConfig
from rl_train.assembly.checks import warn_about_engine_limit
from rl_train.assembly.contracts import capabilities_of
from rl_train.assembly.parts import make_collector, watch_training
from rl_train.assembly.placement import make_cluster, resolve_adapters, resolve_precision
from rl_train.assembly.preparation import DataLoaders, Preparation, inputs_of
from rl_train.assembly.rules import check_before_start
from rl_train.assembly.rules.run_facts import RunFacts
from rl_train.assembly.weights import make_weights
from rl_train.assembly.workers import Builder, Workers
from rl_train.checkpoints.inputs import ComparedConfig, Inputs
from rl_train.checkpoints.state import Checkpoints, Stateful
from rl_train.checkpoints.store import TimeLimit
from rl_train.config.algorithm import RolloutNeeds
from rl_train.config.loader import LoadedConfig, device_values, load_config, precisions_of, with_precisions
from rl_train.config.rules.models import loaded_models
from rl_train.config.rules.ranking import can_be_ranked
from rl_train.config.rules.rule import CheckedConfig, Use
from rl_train.config.rules.run import ENGINE_SHARES_GPUS
from rl_train.config.schedules import schedule_lengths
from rl_train.config.schema import RunConfig, parse_duration
from rl_train.config.sources import ConfigFiles
from rl_train.data.messages import DatumSpec, images_of
from rl_train.metrics.logger import make_loggers
from rl_train.metrics.measured import ModelFlops, PeakMemory, peak_tflops
from rl_train.rollouts.collect import Collector, stream_rows_of
from rl_train.rollouts.evaluation import Evaluation, ValidationSet
from rl_train.rollouts.schedule import Schedule
from rl_train.rollouts.scheduled_source import ScheduledSource
from rl_train.rollouts.source import MixedRolloutSource, ReplaySource, RolloutSource, SampledSteps
from rl_train.rollouts.teacher_rows import TeacherPrompts
from rl_train.rollouts.trajectory import sample_seed
from rl_train.run import Run
from rl_train.run_folders.run_folder import checkpoint_store
from rl_train.weight_sync.canary import CanaryCalibration, StreamedCanary
from rl_train.weight_sync.device_memory import DeviceMemory
from rl_train.weight_sync.synchronizer import NoEngine, WeightSynchronizer

_log = logging.getLogger("rlcore")


def build_run(
    loaded: LoadedConfig,
    *,
    folder: Path,
    registry: Registry,
    exits: ExitStack,
    before_models: Callable[[RunConfig, ComparedConfig], None] = lambda *_: None,
    replay: Path | None = None,
) -> Run:
    """Build the run of a config; data and tokenizer are loaded first, because their errors show within seconds.

    Args:
        loaded: the config.
        folder: the run folder.
        registry: used to look up components.
        exits: closes all components in reverse order.
        before_models: called with the final config (epochs converted to steps) and the config for checkpoints before models are
            loaded, so that a run that cannot be resumed fails within seconds.
        replay: folder of a run whose recorded rollouts are trained on, without an engine unless validation samples; None
            samples them.

    Raises:
        InvalidConfigError: lists all problems with the classes, models and data of the config.
    """
    checked = CheckedConfig(run=loaded.run, registry=registry, layout=loaded.layout)
    facts = RunFacts.of(checked, located=loaded)
    check_before_start(facts)
    prepared, loss_fn, config = facts.prepared, facts.loss_fn, facts.prepared.training_config
    seed_process(config.algorithm.seed)
    compared = compared_config(loaded, inputs_of(loaded, prepared) if config.checkpointing.enabled else {})
    before_models(config, compared)
    groups = len(loaded_models(config)) + (not config.engine_has_own_resources)
    with with_key("cluster"):
        cluster = make_cluster(config.cluster, exits, groups=groups, seed=config.algorithm.seed)
    config = resolve_precision(config, cluster)
    compared = replace(compared, values=with_precisions(loaded, precisions_of(config)).redacted)
    config = resolve_adapters(config, registry)
    builder = Builder(run=config, registry=registry, exits=exits, cluster=cluster, trains=True)
    samples = config.algorithm.runtime_needs.samples and (replay is None or bool(prepared.loaders.validation_prompts))
    # Without `cluster.use_gpus`, only the started cluster knows.
    if samples and config.rollout.max_staleness > 0 and builder.shares_gpus:
        raise ConfigError(ENGINE_SHARES_GPUS, key="rollout.max_staleness")
    workers = builder.start(samples=samples)
    workers.wait_ready()
    gc.collect(0)  # ends a `late_first_collection`
    warn_about_engine_limit(config, workers.generation)
    return assemble_run(
        builder,
        workers,
        prepared,
        loss_fn=loss_fn,
        compared=compared,
        folder=folder,
        replay=replay,
    )


def compared_config(loaded: LoadedConfig, inputs: Inputs) -> ComparedConfig:
    """A config and what it refers to, for a comparison with the config of a checkpoint."""
    return ComparedConfig(
        values=loaded.redacted,
        algorithm=loaded.run.algorithm_name,
        inputs=inputs,
        default=loaded.layout.default,
        by_device=device_values(loaded.run, Devices(use_gpus=False)).keys(),
    )


def assemble_run(
    builder: Builder,
    workers: Workers,
    prepared: Preparation,
    *,
    loss_fn: LossFunction,
    compared: ComparedConfig,
    folder: Path,
    replay: Path | None = None,
) -> Run:
    """A Run from existing workers and data.

    Args:
        builder: creates weight synchronization and loggers; holds the final config.
        workers: policy, engine, environments and companion models.
        prepared: tokenizer, tools and data.
        loss_fn: the loss.
        compared: the config for checkpoints.
        folder: the run folder.
        replay: as `build_run`.
    """
    config, loaders = builder.run, prepared.loaders
    needs = config.algorithm.runtime_needs
    companions = workers.companion_models
    run = Run(
        config=config,
        folder=folder,
        policy=workers.policy,
        value=workers.companions.get("value"),
        teacher=workers.policy if needs.teaches_itself else workers.companions.get("teacher"),
        teachers={task: workers.companions[f"teachers.{task}"] for task in config.teachers},
        teacher_prompts=TeacherPrompts.of_run(config, prepared.tokenizer),
        generation=workers.generation,
        loss_fn=loss_fn,
        loggers=make_loggers(config.logger.loggers, builder.registry, folder, builder.exits),
        checkpoints=None,
        tokenizer=prepared.tokenizer,
        batches=loaders.batches,
        initial_metrics=loaders.metrics(),
        flops=_model_flops(config, workers.policy),
    )
    run.metrics.memory = PeakMemory(
        (workers.policy, workers.generation, *companions), deadline_s=config.cluster.deadlines.refit_s
    )
    if isinstance(config.algorithm, GRPOConfig):
        run.estimator = make_estimator(config.algorithm.adv_estimator)
    if isinstance(loss_fn, DistillationLossFn):
        loss_fn.teachers = tuple(config.teachers)
    collector = None
    if workers.generation is not None:
        run.memory = _device_memory(builder, workers)
        run.weights = make_weights(builder, workers.policy, workers.generation, prepared.tokenizer, memory=run.memory)
        collector = make_collector(builder, prepared, workers.generation, workers.environments)
        run.activities = collector.activities
        run.metrics.progress.rollouts = collector.activities.counts
    elif replay is not None:
        run.memory = DeviceMemory(workers.policy, companions=companions)
        run.weights = NoEngine()
    run.rollouts = _rollout_source(run, collector, loaders, replay)
    if run.rollouts is not None and collector is not None and replay is None:
        builder.exits.callback(run.rollouts.close)
        _prepare_for_refits(run, builder, collector)
    run.validation_sets = _validation_sets(config, loaders, collector)
    if config.checkpointing.max_time is not None:
        run.time_limit = TimeLimit(parse_duration(config.checkpointing.max_time), started=time.perf_counter())
    run.checkpoints = _checkpoints(run, compared, folder=folder)
    if isinstance(run.weights, WeightSynchronizer):
        run.keep("canary", run.weights.canary.calibration if run.weights.canary is not None else CanaryCalibration())
    run.keep("control", run.control)
    watch_training(run, builder)
    return run


def _device_memory(builder: Builder, workers: Workers) -> DeviceMemory:
    config = builder.run
    return DeviceMemory(
        workers.policy,
        workers.generation if config.rollout.max_staleness == 0 else None,  # otherwise, rows are always in progress
        companions=workers.companion_models,
        limited=builder.takes_turns,
        both_fit=config.engine_has_own_resources or (builder.shares_gpus and not builder.takes_turns),
    )


def _prepare_for_refits(run: Run, builder: Builder, collector: Collector) -> None:
    """Rollouts that may be in progress at a refit end before it or continue over it, and so do the canary's rows."""
    assert run.rollouts is not None
    assert isinstance(run.weights, WeightSynchronizer)
    over_refits = not _ends_rollouts_before_refits(builder)
    if not over_refits:
        run.weights.before_refit = run.rollouts.end_rollouts
    if run.weights.canary is not None and run.config.rollout.max_staleness > 0 and collector.streams_rows:
        rows = stream_rows_of(collector, over_refits=over_refits)
        run.weights.canary.streamed = StreamedCanary(rows, over_refits=over_refits)


def _ends_rollouts_before_refits(builder: Builder) -> bool:
    """Whether rollouts may be in progress at a refit but must not span it: by the order, or because of the engine."""
    rollout, generation = builder.run.rollout, builder.run.policy.generation
    if rollout.max_staleness == 0 or generation is None:
        return False
    engine = builder.registry.find(Kind.GENERATION, generation.backend)
    return rollout.order == "exact" or Capability.REFIT_IN_FLIGHT not in capabilities_of(engine)


def _rollout_source(run: Run, collector: Collector | None, loaders: DataLoaders, replay: Path | None) -> RolloutSource | None:
    """Rollouts of the prompts, mixed with the data's own answers if the algorithm uses them; None if it does not sample."""
    config = run.config
    needs = config.algorithm.runtime_needs.rollouts
    if loaders.prompts is None or needs is None:
        return None
    samples = SampledSteps(seed=config.algorithm.seed, fraction=needs.sampled_fraction)
    sampled: RolloutSource
    if replay is not None:
        if config.needs_sampled_sets:
            raise UserError(
                "--replay: recorded rollouts do not have the tokens that top_p, top_k and min_p kept, which training needs. "
                "Replay a run without these keys.",
                key="policy.generation",
            )
        if config.algorithm.runtime_needs.teacher_prompt is not None:
            raise UserError(
                "--replay: recorded rollouts do not have the messages and metadata that the teacher's prompt is written from. "
                "Replay a run whose teacher reads the student's prompt.",
                key=config.algorithm_name,
            )
        reward_weights = {task: section.reward_weights for task, section in config.env.items()}
        sampled = ReplaySource(replay, group_size=needs.samples_per_prompt, reward_weights=reward_weights)
    elif collector is not None:
        sampled = _scheduled_source(run, needs, collector, loaders, samples)
    else:
        return None
    if loaders.answers is None:
        return sampled
    return MixedRolloutSource(sampled, loaders.answers, group_size=needs.samples_per_prompt, samples=samples)


def _scheduled_source(
    run: Run, needs: RolloutNeeds, collector: Collector, loaders: DataLoaders, samples: SampledSteps
) -> ScheduledSource:
    config, weights, policy = run.config, run.weights, run.policy
    assert isinstance(weights, WeightSynchronizer)
    assert loaders.prompts is not None
    prompts, last = needs.prompts_per_draw, config.algorithm.max_num_steps
    return ScheduledSource(
        collector,
        loaders.prompts,
        schedule=Schedule(
            max_staleness=config.rollout.max_staleness,
            ahead=config.rollout.batches_ahead,
            demand=lambda step: prompts if step <= last and samples(step) else 0,
            exact=config.rollout.order == "exact",
        ),
        weight_version=lambda: weights.synced_version,
        trained_version=lambda: policy.weight_version,
        group_size=needs.samples_per_prompt,
        reward_names={task: section.reward_names for task, section in config.env.items()},
        min_scored=config.rollout.min_scored_of(needs.samples_per_prompt),
        max_failed_share=config.rollout.max_failed_share,
        sampled=loaders.sampled,
        greedy_baseline=needs.greedy_baseline,
    )


def _model_flops(config: RunConfig, policy: object) -> ModelFlops | None:
    if not isinstance(policy, WorkerFacade) or "matrix_sizes" not in policy.facts:
        return None
    known = peak_tflops(policy.facts.get("device_name"), config.policy.dtype_name)
    peak = known if config.profiling.peak_tflops is None else config.profiling.peak_tflops
    return ModelFlops(policy.facts["matrix_sizes"], ranks=policy.group.world_size, peak=peak)


def _validation_sets(config: RunConfig, loaders: DataLoaders, collector: Collector | None) -> list[ValidationSet]:
    algorithm, generation = config.algorithm, config.policy.generation
    evaluations = {
        name: Evaluation(
            collector=collector,
            prompts=prompts,
            max_samples=algorithm.max_val_samples,
            samples_per_prompt=algorithm.runtime_needs.val_samples_per_prompt,
            greedy=generation is not None and generation.val_temperature == 0.0,
        )
        for name, prompts in loaders.validation_prompts.items()
        if collector is not None
    }
    periods = {name: each.val_period for name, each in config.data.validation_sets.items() if each.val_period is not None}
    return [
        ValidationSet(
            name=name,
            val_period=periods.get(name, algorithm.val_period),
            evaluation=evaluations.get(name),
            batches=loaders.validation_batches.get(name),
        )
        for name in dict.fromkeys([*evaluations, *loaders.validation_batches])
    ]


def _checkpoints(run: Run, compared: ComparedConfig, *, folder: Path) -> Checkpoints | None:
    config, section = run.config, run.config.checkpointing
    if not section.enabled:
        return None
    stateful: dict[str, Stateful] = {}
    if run.rollouts is not None:
        stateful["rollouts"] = run.rollouts
    if run.batches is not None:
        stateful["batches"] = run.batches
    models = {"policy": run.policy} | ({"value": run.value} if run.value is not None else {})
    checkpoints = Checkpoints(
        store=checkpoint_store(section if can_be_ranked(config) else section.model_copy(update={"keep_top_k": None}), folder),
        models=models,
        model_names={name: getattr(config, name).model_name for name in models},
        parts=stateful,
        config=compared,
        save_optimizer=section.save_optimizer,
        tokenizer=run.tokenizer,
        schedule_lengths=schedule_lengths(config),
        free_memory_for=run.free_memory_for,
    )
    checkpoints.check_disk_space(num_saves=-(-config.algorithm.max_num_steps // section.save_period))
    checkpoints.try_save()
    return checkpoints


Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """The first prompts of a config's data."""

    batch: BatchedDataDict[Any]
    """The prompts, a `GenerationDatumSpec` with `sample_seeds`."""
    questions: Sequence[Sequence[Message]]
    """The prompts as messages with role and content."""

    def token_ids(self) -> list[torch.Tensor]:
        """One int64 tensor [T] per prompt, without padding."""
        rows = zip(self.batch["input_ids"], self.batch["input_lengths"].tolist(), strict=True)
        return [row[:length] for row, length in rows]


@dataclass(frozen=True, kw_only=True)
class PolicyAndEngine:
    """A policy, and an engine with the same weights."""

    config: RunConfig
    policy: ColocatablePolicyInterface
    generation: GenerationInterface
    refit: str
    """The weight transport; the engine's weights were verified."""

    def engine_precision(self) -> str:
        """Dtypes of the engine's floating-point weights, such as `bfloat16`, separated by commas."""
        held = self.generation.weight_digests()
        dtypes = {digest.partition("[")[0] for name, digest in held.items() if not is_adapter(name)}
        return ", ".join(sorted(name for name in dtypes if "float" in name))

    def adapters_are_zero(self) -> bool:
        """Whether B of each adapter that was sent is 0, as before the first step; false if the adapters were merged."""
        kind: Any = self.generation.weight_fingerprint().partition(":")[0]
        sent = {name: form for name, form in (self.policy.prepare_refit_info() or {}).items() if name.endswith(LORA_B)}
        zeros = ((name, torch.zeros(shape, dtype=dtype_of(dtype))) for name, (shape, dtype) in sent.items())
        return bool(sent) and tensor_digests(zeros, kind=kind).items() <= self.generation.weight_digests().items()

    @property
    def by_reference(self) -> bool:
        """Whether both run in this process."""
        return self.config.cluster.backend == "in_process"


@dataclass(frozen=True, kw_only=True)
class PolicyAndEnginePlan:
    """The config, its tokenizer and its prompts, before any process is started.

    Attributes:
        config: the run.
        registry: used to look up components.
        tokenizer: the policy's.
        prompts: the prompts to sample from.
    """

    config: RunConfig
    registry: Registry
    tokenizer: Any
    prompts: Prompts

    @contextmanager
    def started(self) -> Iterator[PolicyAndEngine]:
        """Start both backends and sync the weights once. Their processes are stopped at the end of the block.

        Raises:
            WeightSyncError: the engine's weights could not be verified.
        """
        with ExitStack() as exits:
            builder = Builder.without_training(self.config, self.registry, exits)
            policy, generation = builder.policy_and_engine()
            # No tokenizer, so that there is no canary: a disagreement should be measured here, not raised.
            weights = make_weights(builder, policy, generation)
            weights.sync()
            yield PolicyAndEngine(config=builder.run, policy=policy, generation=generation, refit=weights.transport_name)


def plan_policy_and_engine(config_path: ConfigFiles, overrides: Sequence[str] = (), *, num_prompts: int) -> PolicyAndEnginePlan:
    """Load a config, its tokenizer and the first `num_prompts` prompts of its training data. Does not start processes.

    Raises:
        ConfigError: the config is invalid, or has no engine or no data.
        DataError: there is no prompt.
    """
    registry = Registry(discover())
    config = load_config(config_path, overrides, registry=registry, use=Use.COMPARE).run
    # No row after these prompts is used, so none is checked.
    datasets = config.data.model_copy(update={"validation": None, "validation_sets": {}, "check_rows": 0})
    prepared = Preparation(config.model_copy(update={"data": datasets}), registry, datasets=datasets)
    tokenizer = prepared.tokenizer
    return PolicyAndEnginePlan(
        config=config, registry=registry, tokenizer=tokenizer, prompts=_first_prompts(prepared, num_prompts)
    )


def _first_prompts(prepared: Preparation, count: int) -> Prompts:
    train, seed, padding = prepared.data.train, prepared.config.algorithm.seed, prepared.tokenizer.pad_token_id
    if train is None:
        raise ConfigError("data.train is required. Prompts are taken from it. Add `data: {train: {dataset_name: ...}}`.")
    if count < 1:
        raise ConfigError(f"The number of prompts is {count}: use at least 1.")
    first: list[DatumSpec] = next(iter(prepared.prompts(train, batch_size=count)))
    usable = {row: prompt for row, prompt in enumerate(first) if prompt["loss_multiplier"] > 0}
    if not usable:
        raise DataError(f"All of the first {len(first)} prompts are too long and dropped: raise data.max_input_seq_length.")
    logs = [prompt["message_log"] for prompt in usable.values()]
    rows = [torch.cat([message["token_ids"] for message in log]) for log in logs]
    batch: BatchedDataDict[Any] = BatchedDataDict(
        {
            "input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding),
            "input_lengths": torch.tensor([len(row) for row in rows], dtype=torch.int64),
            "stop_strings": [prompt.get("stop_strings") for prompt in usable.values()],
            "sample_seeds": torch.tensor([sample_seed(seed, row) for row in usable], dtype=torch.int64),
        }
    )
    if any(images := [images_of(log) for log in logs]):
        batch["images"] = images
    questions = [[{"role": message["role"], "content": plain_text(message["content"])} for message in log] for log in logs]
    return Prompts(batch=batch, questions=questions)
