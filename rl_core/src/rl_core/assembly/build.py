"""From a config to a Run; the one page that says what a run is made of."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rl_core.assembly.data import conversation_loader, prompt_loader
from rl_core.assembly.parts import Builder, make_cluster
from rl_core.checkpoints.state import Checkpoints, Stateful
from rl_core.checkpoints.store import CheckpointStore, Retention
from rl_core.config.schema import RunConfig
from rl_core.data.tokenizer import load_tokenizer
from rl_core.errors import ConfigError
from rl_core.interfaces.environment import EnvironmentInterface
from rl_core.interfaces.generation import GenerationInterface
from rl_core.plugins.registry import Registry
from rl_core.rollouts.batches import TrainingBatches
from rl_core.rollouts.collect import Collector
from rl_core.rollouts.evaluate import Evaluation
from rl_core.rollouts.source import OnDemandSource
from rl_core.run import Run


def build_run(config: RunConfig, *, resolved: Mapping[str, Any], folder: Path, registry: Registry, exits: ExitStack) -> Run:
    """Make every part that the config asks for; data and tokenizer first, since they fail in seconds.

    Args:
        config: the run.
        resolved: the same, as plain values for the checkpoint.
        folder: the run folder.
        registry: where components are found.
        exits: closes every part, in the reverse order.
    """
    tokenizer = load_tokenizer(
        config.policy.tokenizer.name or config.policy.model_name, chat_template=config.policy.tokenizer.chat_template
    )
    loaders = _Loaders(config, registry, tokenizer)
    builder = Builder(run=config, registry=registry, exits=exits, cluster=make_cluster(config.cluster, exits))
    loss_component = registry.find("loss", config.loss_fn.name or config.algorithm.default_loss)
    parts = builder.start(samples=loaders.samples)
    run = Run(
        config=config,
        folder=folder,
        policy=parts.policy,
        loss_fn=loss_component.load()(config.loss_fn),
        loggers=builder.loggers(folder),
        checkpoints=None,
        tokenizer=tokenizer,
    )
    if parts.generation is not None:
        run.generation = parts.generation
        run.weights = builder.weights(parts.policy, parts.generation)
        collector = _collector(config, parts.generation, parts.environments, tokenizer)
        if loaders.prompts is not None:
            group_size = getattr(config.algorithm, "num_generations_per_prompt", 1)
            run.rollouts = OnDemandSource(collector, loaders.prompts, group_size=group_size)
            exits.callback(run.rollouts.close)
        if loaders.validation_prompts is not None:
            run.evaluation = Evaluation(
                collector=collector,
                prompts=loaders.validation_prompts,
                max_samples=config.algorithm.max_val_samples,
                samples_per_prompt=getattr(config.algorithm, "val_num_generations_per_prompt", 1),
                greedy=config.policy.generation is not None and config.policy.generation.val_temperature == 0.0,
            )
    run.batches = loaders.batches
    run.validation_batches = loaders.validation_batches
    run.checkpoints = _checkpoints(config, resolved, folder, run)
    return run


class _Loaders:
    """The data of a run: prompts for an algorithm that samples, conversations for one that imitates."""

    def __init__(self, config: RunConfig, registry: Registry, tokenizer: Any) -> None:
        self.prompts = self.validation_prompts = self.batches = self.validation_batches = None
        algorithm, data = config.algorithm, config.data
        if data.train is None:
            raise ConfigError("data.train names no training data. Add `data: {train: {dataset_name: ...}}`.")
        validates = algorithm.val_period > 0 or algorithm.val_at_start or algorithm.val_at_end
        if validates and data.validation is None:
            raise ConfigError(
                "The algorithm validates (val_period, val_at_start or val_at_end), and data.validation names no data. "
                "Add `data: {validation: {dataset_name: ...}}`, or switch validation off."
            )
        sources = config, registry, tokenizer
        val_prompts = algorithm.needs_generation or getattr(algorithm, "val_accuracy", False)
        self.samples = val_prompts
        if val_prompts and (config.policy.generation is None or not config.env):
            raise ConfigError(
                f"{config.algorithm_name} samples and scores completions: it needs `policy.generation` and a section in `env`."
            )
        if validates and data.validation is not None and val_prompts:
            self.validation_prompts = prompt_loader(
                data.validation, *sources, batch_size=algorithm.val_batch_size, shuffle=False
            )
        if algorithm.needs_generation:
            per_draw = getattr(algorithm, "prompts_per_draw", 1)
            self.prompts = prompt_loader(data.train, *sources, batch_size=per_draw, shuffle=data.shuffle)
            return
        rows, pad = getattr(algorithm, "global_batch_size", 1), tokenizer.pad_token_id
        final = getattr(algorithm, "only_unmask_final", False)
        loader = conversation_loader(data.train, *sources, batch_size=rows, shuffle=data.shuffle)
        self.batches = TrainingBatches(loader, pad_token_id=pad, only_unmask_final=final)
        if validates and data.validation is not None:
            held_out = conversation_loader(data.validation, *sources, batch_size=algorithm.val_batch_size, shuffle=False)
            self.validation_batches = TrainingBatches(held_out, pad_token_id=pad, only_unmask_final=final)


def _collector(
    config: RunConfig, generation: GenerationInterface, environments: Mapping[str, EnvironmentInterface], tokenizer: Any
) -> Collector:
    turns = getattr(config.algorithm, "max_rollout_turns", 1)
    return Collector(
        generation=generation,
        environments=environments,
        tokenizer=tokenizer,
        seed=config.algorithm.seed,
        max_turns={task: section.max_rollout_turns or turns for task, section in config.env.items()},
        max_total_length=config.policy.max_total_sequence_length,
    )


def _checkpoints(config: RunConfig, resolved: Mapping[str, Any], folder: Path, run: Run) -> Checkpoints | None:
    section = config.checkpointing
    if not section.enabled:
        return None
    parts: dict[str, Stateful] = {}
    if run.rollouts is not None:
        parts["rollouts"] = run.rollouts
    if run.batches is not None:
        parts["batches"] = run.batches
    store = CheckpointStore(
        Path(section.checkpoint_dir) if section.checkpoint_dir else folder / "checkpoints",
        Retention(
            keep_latest_k=section.keep_latest_k,
            keep_top_k=section.keep_top_k,
            metric_name=section.metric_name,
            higher_is_better=section.higher_is_better,
        ),
    )
    return Checkpoints(
        store=store,
        policy=run.policy,
        parts=parts,
        config=resolved,
        algorithm=config.algorithm_name,
        save_optimizer=section.save_optimizer,
        tokenizer=run.tokenizer,
    )
