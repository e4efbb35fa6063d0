"""Builds a Run and all of its components from a config."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

from rl_core.cluster.virtual_cluster import RayVirtualCluster
from rl_core.config.source_tree import dotted
from rl_core.data.process_seed import seed_process
from rl_core.errors import ConfigError
from rl_core.interfaces.loss import LossFunction
from rl_core.plugins.registry import Registry
from rl_train.assembly.collector import make_collector
from rl_train.assembly.contracts import check_contracts
from rl_train.assembly.data import (
    BadRows,
    Source,
    conversation_loader,
    preference_loader,
    prompt_loader,
    read_data,
    read_validation_sets,
)
from rl_train.assembly.late_errors import with_key
from rl_train.assembly.losses import make_loss
from rl_train.assembly.model_checks import check_models, tokenizer_key, warn_about_engine_limit
from rl_train.assembly.reward_checks import resolve_completion_formats
from rl_train.assembly.training_checks import watch_training
from rl_train.assembly.workers import Builder, Workers, make_cluster
from rl_train.checkpoints.state import Checkpoints, Stateful
from rl_train.checkpoints.time_limit import TimeLimit
from rl_train.config.data_checks import validates
from rl_train.config.durations import parse_duration
from rl_train.config.lr_schedule_checks import (
    schedule_conflicts,
    schedule_lengths,
    schedule_warnings,
)
from rl_train.config.own_weights_checks import check_own_weights
from rl_train.config.schema import RunConfig
from rl_train.config.section_resolver import COMPANIONS
from rl_train.config.turn_checks import check_turns
from rl_train.data.dataloader import BatchedDataLoader
from rl_train.data.policy_tokenizer import load_policy_tokenizer
from rl_train.data.unknown_tokens import WARN_ABOVE, UnknownTokens, count_unknown_tokens
from rl_train.rollouts.batches import PreferenceBatches, TrainingBatches
from rl_train.rollouts.collect import Collector
from rl_train.rollouts.evaluate import Evaluation
from rl_train.rollouts.mixed_source import MixedRolloutSource
from rl_train.rollouts.source import OnDemandSource, RolloutSource
from rl_train.rollouts.validation_set import ValidationSet
from rl_train.run import Run
from rl_train.run_folders.run_folder import checkpoint_store
from rl_train.tools.task_tools import TaskTools, tools_of_run

_log = logging.getLogger("rlcore")


def build_run(
    config: RunConfig,
    *,
    resolved: Mapping[str, Any],
    folder: Path,
    registry: Registry,
    exits: ExitStack,
    before_models: Callable[[RunConfig], None] = lambda _: None,
) -> Run:
    """Build the run of a config; data and tokenizer are loaded first, because their errors show within seconds.

    Args:
        config: the run.
        resolved: the same as plain values, for checkpoints.
        folder: the run folder.
        registry: used to look up components.
        exits: closes all components in reverse order.
        before_models: called with the final config (epochs converted to steps) before models are loaded, so that a run that
            cannot be resumed fails within seconds.
    """
    with with_key(f"policy.{tokenizer_key(config.policy)}"):
        tokenizer = load_policy_tokenizer(config.policy)
    check_models(config, tokenizer)
    tools = tools_of_run(config, registry, tokenizer) if config.algorithm.runtime_needs.samples else None
    train, validation = read_sources(config, registry)
    loaders = DataLoaders(config, tokenizer, train=train, validation=validation, tools=tools)
    config = resolve_completion_formats(loaders.resolve_steps(config), train, *validation.values())
    check_turns(config, registry)
    check_own_weights(config, registry)
    loss_fn = loss_of(config, registry)
    check_contracts(config, registry, loss_fn)
    seed_process(config.algorithm.seed)
    before_models(config)
    with with_key("cluster"):
        cluster = _cluster(config, exits)
    builder = Builder(run=config, registry=registry, exits=exits, cluster=cluster)
    workers = builder.start(samples=loaders.samples)
    workers.wait_ready()
    warn_about_engine_limit(config, workers.generation)
    return assemble_run(builder, workers, loaders, loss_fn=loss_fn, tokenizer=tokenizer, resolved=resolved, folder=folder)


def assemble_run(
    builder: Builder,
    parts: Workers,
    loaders: DataLoaders,
    *,
    loss_fn: LossFunction,
    tokenizer: Any,
    resolved: Mapping[str, Any],
    folder: Path,
) -> Run:
    """A Run from existing workers and data.

    Args:
        builder: creates weight synchronization and loggers; holds the final config.
        parts: policy, engine, environments and companion models.
        loaders: the data.
        loss_fn: the loss.
        tokenizer: the policy's.
        resolved: the config as plain values, for checkpoints.
        folder: the run folder.
    """
    config = builder.run
    run = Run(
        config=config,
        folder=folder,
        policy=parts.policy,
        value=parts.companions.get("value"),
        teacher=parts.companions.get("teacher"),
        loss_fn=loss_fn,
        loggers=builder.loggers(folder),
        checkpoints=None,
        tokenizer=tokenizer,
    )
    evaluations: dict[str, Evaluation] = {}
    if parts.generation is not None:
        run.generation = parts.generation
        run.weights = builder.weights(parts.policy, parts.generation, tokenizer)
        collector = make_collector(
            config,
            parts.generation,
            parts.environments,
            tokenizer,
            loaders.tools,
            registry=builder.registry,
            exits=builder.exits,
        )
        run.rollouts = _rollout_source(config, collector, loaders)
        if run.rollouts is not None:
            builder.exits.callback(run.rollouts.close)
        evaluations = {name: _evaluation(config, collector, prompts) for name, prompts in loaders.validation_prompts.items()}
    run.initial_metrics = loaders.metrics()
    run.batches = loaders.batches
    run.validation_sets = [
        ValidationSet(
            name=name,
            val_period=_val_period(config, name),
            evaluation=evaluations.get(name),
            batches=loaders.validation_batches.get(name),
        )
        for name in dict.fromkeys([*evaluations, *loaders.validation_batches])
    ]
    if config.checkpointing.max_time is not None:
        run.time_limit = TimeLimit(parse_duration(config.checkpointing.max_time), started=time.perf_counter())
    run.checkpoints = _checkpoints(config, resolved, folder, run)
    if run.weights is not None:
        run.keep("canary", run.weights.calibration)
    watch_training(run, builder)
    return run


def _rollout_source(config: RunConfig, collector: Collector, loaders: DataLoaders) -> RolloutSource | None:
    """Rollouts of the prompts, mixed with the data's own answers if the algorithm uses them; None if it does not sample."""
    needs = config.algorithm.runtime_needs.rollouts
    if loaders.prompts is None or needs is None:
        return None
    sampled = OnDemandSource(
        collector,
        loaders.prompts,
        group_size=needs.samples_per_prompt,
        reward_names={task: section.reward_names for task, section in config.env.items()},
        min_scored=config.rollout.min_scored_of(needs.samples_per_prompt),
        max_failed_share=config.rollout.max_failed_share,
    )
    if loaders.answers is None:
        return sampled
    return MixedRolloutSource(
        sampled,
        loaders.answers,
        group_size=needs.samples_per_prompt,
        sampled_fraction=needs.sampled_fraction,
        seed=config.algorithm.seed,
    )


def _evaluation(config: RunConfig, collector: Collector, prompts: BatchedDataLoader) -> Evaluation:
    return Evaluation(
        collector=collector,
        prompts=prompts,
        max_samples=config.algorithm.max_val_samples,
        samples_per_prompt=config.algorithm.runtime_needs.val_samples_per_prompt,
        greedy=config.policy.generation is not None and config.policy.generation.val_temperature == 0.0,
    )


def _val_period(config: RunConfig, name: str) -> int:
    period = config.data.validation_sets[name].val_period if name else None
    return config.algorithm.val_period if period is None else period


class DataLoaders:
    """The data loaders of a run: prompts, preference pairs or conversations, as the algorithm needs.

    Args:
        config: the run.
        tokenizer: the policy's.
        train: the training data; None if the algorithm needs none.
        validation: the validation data by the name of its set, '' for `data.validation`; empty if validation is disabled.
        tools: the tools of the environments; rows without `tools` are shown those of their task.
    """

    def __init__(
        self,
        config: RunConfig,
        tokenizer: Any,
        *,
        train: Source | None,
        validation: Mapping[str, Source],
        tools: TaskTools | None = None,
    ) -> None:
        self.tools = tools or TaskTools()
        self.prompts: BatchedDataLoader | None = None
        self.validation_prompts: dict[str, BatchedDataLoader] = {}
        self.batches: TrainingBatches | None = None
        self.answers: TrainingBatches | None = None
        self.validation_batches: dict[str, TrainingBatches] = {}
        needs, shuffle = config.algorithm.runtime_needs, config.data.shuffle
        self.samples = needs.samples
        self.bad_rows = train.bad_rows if train is not None else BadRows()
        val_size = config.algorithm.val_batch_size
        for name, source in validation.items() if self.samples else ():
            with _at_set(name):
                self.validation_prompts[name] = prompt_loader(
                    source, config, tokenizer, batch_size=val_size, shuffle=False, tools=self.tools
                )
        if needs.rollouts is not None and train is not None:
            per_draw = needs.rollouts.prompts_per_draw
            self.prompts = prompt_loader(train, config, tokenizer, batch_size=per_draw, shuffle=shuffle, tools=self.tools)
            if needs.rollouts.sampled_fraction < 1.0:
                rows = needs.rollouts.rows_per_draw
                self.answers = _answer_batches(train, config, tokenizer, batch_size=rows, shuffle=shuffle)
        if needs.records is not None and train is not None:
            rows = needs.records.records_per_step
            self.batches = _answer_batches(train, config, tokenizer, batch_size=rows, shuffle=shuffle)
            for name, source in validation.items():
                with _at_set(name):
                    batches = _answer_batches(source, config, tokenizer, batch_size=val_size, shuffle=False)
                self.validation_batches[name] = batches
        self.unknown_tokens = self._count_unknown_tokens(tokenizer)

    def metrics(self) -> dict[str, float]:
        """Metrics of the training data."""
        metrics: dict[str, float] = {"data/bad_rows": self.bad_rows.count} if self.bad_rows.count else {}
        if self.unknown_tokens is not None:
            metrics["data/unknown_token_frac"] = self.unknown_tokens.fraction
        return metrics

    def _count_unknown_tokens(self, tokenizer: Any) -> UnknownTokens | None:
        """Count unknown tokens in the first training rows, log their fraction, and warn if it is high."""
        rows = self.prompts.dataset if self.prompts is not None else self.batches.rows if self.batches is not None else ()
        counts = count_unknown_tokens(rows, tokenizer)
        if counts is None:
            return None
        _log.info("%.2f %% of the tokens of the first %d training rows are unknown", 100 * counts.fraction, counts.rows)
        if counts.fraction > WARN_ABOVE:
            _log.warning(
                "%.1f %% of the tokens of the first %d training rows are %s, the tokenizer's unknown token; the first such "
                "message is %r. The model cannot learn from this text. Use data that the tokenizer covers, or a model with "
                "another tokenizer.",
                100 * counts.fraction,
                counts.rows,
                tokenizer.unk_token,
                counts.example[:80],
            )
        return counts

    def resolve_steps(self, config: RunConfig) -> RunConfig:
        """The config with epochs converted to steps, after checking that learning-rate schedules fit the run.

        Raises:
            ConfigError: a schedule ends before the run.
        """
        algorithm = config.algorithm
        epochs = algorithm.max_num_epochs
        if epochs is not None and (self.prompts is not None or self.batches is not None):
            num_batches = self.prompts.draws(epochs) if self.prompts is not None else epochs * len(self.batches or ())
            last = min(algorithm.max_num_steps, num_batches)
            counted = algorithm.model_copy(update={"max_num_steps": last, "max_num_epochs": None})
            config = config.model_copy(update={"algorithm": counted})
        if conflicts := [f"{dotted(path)}: {message}" for path, message in schedule_conflicts(config)]:
            raise ConfigError("\n".join(conflicts))
        for path, message in schedule_warnings(config):
            _log.warning("%s: %s", dotted(path), message)
        return config


def _at_set(name: str) -> AbstractContextManager[None]:
    return with_key(f"data.validation_sets.{name}") if name else nullcontext()


def read_sources(config: RunConfig, registry: Registry) -> tuple[Source | None, dict[str, Source]]:
    """The training data if the algorithm needs it, and, if validation is enabled, the validation data by name of its set.

    Raises:
        ConfigError: the data, the generation backend or the environments are missing.
    """
    algorithm, data, needs = config.algorithm, config.data, config.algorithm.runtime_needs
    if needs.training_data and not data.has_training_data:
        raise ConfigError("data.train is required. Add `data: {train: {dataset_name: ...}}`.")
    if validates(config) and not data.has_validation_data:
        raise ConfigError(
            "Validation is enabled (val_period, val_at_start or val_at_end), but there is no validation data. "
            "Add `data: {validation: {dataset_name: ...}}` or `data: {split: {validation: 0.05}}`, or disable validation."
        )
    if needs.samples and (config.policy.generation is None or (algorithm.needs_rewards and not config.env)):
        raise ConfigError(
            f"{config.algorithm_name} samples and scores completions: it needs `policy.generation` and a section in `env`."
        )
    if not validates(config):
        return read_data(data.model_copy(update={"validation": None}), registry)[0], {}
    train, validation = read_data(data, registry)
    first = {"": validation} if validation is not None else {}
    return train, first | read_validation_sets(data, registry)


def loss_of(config: RunConfig, registry: Registry) -> LossFunction:
    """The loss of a run.

    Raises:
        ConfigError: the config names none and the algorithm has no default, or its constructor raised.
        WrongKindError: its class is not a loss.
    """
    name = config.loss_fn.name or config.algorithm.default_loss
    if name is None:
        raise ConfigError(f"loss_fn.name is required: {config.algorithm_name} has no default loss.")
    with with_key("loss_fn"):
        return make_loss(registry.find("loss", name), config.loss_fn)


def _cluster(config: RunConfig, exits: ExitStack) -> RayVirtualCluster | None:
    companions = sum(getattr(config, name) is not None for name in COMPANIONS)
    return make_cluster(config.cluster, exits, models=1 + companions, seed=config.algorithm.seed)


def _answer_batches(source: Source, config: RunConfig, tokenizer: Any, *, batch_size: int, shuffle: bool) -> TrainingBatches:
    if config.algorithm.needs_preferences:
        pairs = preference_loader(source, config, tokenizer, batch_size=batch_size, shuffle=shuffle)
        return PreferenceBatches(pairs, pad_token_id=tokenizer.pad_token_id)
    conversations = conversation_loader(source, config, tokenizer, batch_size=batch_size, shuffle=shuffle)
    return TrainingBatches(conversations, pad_token_id=tokenizer.pad_token_id)


def _checkpoints(config: RunConfig, resolved: Mapping[str, Any], folder: Path, run: Run) -> Checkpoints | None:
    section = config.checkpointing
    if not section.enabled:
        return None
    stateful: dict[str, Stateful] = {}
    if run.rollouts is not None:
        stateful["rollouts"] = run.rollouts
    if run.batches is not None:
        stateful["batches"] = run.batches
    checkpoints = Checkpoints(
        store=checkpoint_store(section, folder),
        models={"policy": run.policy} | ({"value": run.value} if run.value is not None else {}),
        parts=stateful,
        config=resolved,
        algorithm=config.algorithm_name,
        save_optimizer=section.save_optimizer,
        tokenizer=run.tokenizer,
        schedule_lengths=schedule_lengths(config),
    )
    checkpoints.check_disk_space(num_saves=-(-config.algorithm.max_num_steps // section.save_period))
    return checkpoints
