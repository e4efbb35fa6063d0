"""A config's model, or a checkpoint of it, asked its validation data: what it scores, sample by sample; trains nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.config.schema import RunConfig
from rl_core.data.tokenizer import load_policy_tokenizer
from rl_core.errors import ConfigError
from rl_core.plugins.manager import PluginManager, discover
from rl_core.plugins.registry import Registry
from rl_train.config.loader import LoadedConfig, load_config
from rl_train.data.dataloader import BatchedDataLoader
from rl_train.rollouts.collect import Collector
from rl_train.rollouts.correctness import judge
from rl_train.rollouts.eval_metrics import Group, Scores, grouped, score, usual_ks
from rl_train.rollouts.evaluate import Evaluation
from rl_train.rollouts.summary import ask_environments
from rl_train.runtime.build import make_collector
from rl_train.runtime.checkpoint_paths import CheckpointPaths, find_weights
from rl_train.runtime.data import prompt_loader, read_data
from rl_train.runtime.workers import Builder, make_cluster

Told = Callable[[str, int, int], None]
"""Given what is under way, how much of it is done, and how much there is."""


@dataclass(frozen=True, kw_only=True)
class EvalMode:
    """One way of asking every prompt."""

    greedy: bool
    """Take the most likely tokens."""
    samples_per_prompt: int
    """n."""
    ks: tuple[int, ...]
    """The k of pass@k and cons@k."""

    @property
    def name(self) -> str:
        """`greedy` or `sampled`."""
        return "greedy" if self.greedy else "sampled"


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What one way of asking came to."""

    asking: EvalMode
    scores: Scores
    by_task: dict[str, Scores]
    by_dataset: dict[str, Scores]
    environment: dict[str, float]
    """The environments' own metrics, `env/<task>/<name>`."""
    groups: list[Group]
    """Every prompt with its samples."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What was asked, proven to be what the engine held."""

    given: CheckpointPaths | None
    """The checkpoint or model that was named; None for the config's own model."""
    version: int | None
    """Their weight version; None of a checkpoint, whose optimizer steps only its training state counts, which is not read."""
    fingerprint: str
    """Of the engine's weights; equal weights of equal types have equal ones."""
    transport: str
    """How the weights came to the engine."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """All that an evaluation found."""

    weights: Weights
    passes: list[Pass]


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """What is known before anything starts.

    Attributes:
        loaded: the config.
        manager: the plugins of this process.
        given: the checkpoint or model in place of the config's own model.
        tokenizer: the policy's.
        prompts: the validation data.
        dataset_name: its dataset component, or the members of the mixture that it was held out of.
        askings: how it is asked, one after the other.
        reward_above: what is right, where the environment is not to say; see `rl_train.rollouts.correctness.judge`.
    """

    loaded: LoadedConfig
    manager: PluginManager
    given: CheckpointPaths | None
    tokenizer: Any
    prompts: BatchedDataLoader
    dataset_name: str
    askings: Sequence[EvalMode]
    reward_above: float | None

    def evaluate(self, told: Told = lambda *_: None) -> Evaluated:
        """Start policy, engine and environments, refit once, ask everything; whatever happens, their processes end.

        Args:
            told: shown how it goes.

        Raises:
            CheckpointError: the checkpoint cannot be read, or is of another model.
            WeightSyncError: the engine's weights are not proven to be the policy's.
        """
        config = self.loaded.run
        with ExitStack() as exits:
            told("starting", 0, 1)
            cluster = make_cluster(config.cluster, exits)
            assert config.policy.generation is not None
            builder = Builder(
                run=config,
                registry=Registry(self.manager),
                exits=exits,
                cluster=cluster,
                scoring_temperature=config.policy.generation.temperature,
            )
            parts = builder.start(samples=True)
            assert parts.generation is not None
            if self.given is not None and self.given.is_checkpoint:
                parts.policy.load_checkpoint(self.given.weights)
            weights = builder.weights(parts.policy, parts.generation, self.tokenizer)
            weights.sync()
            told("starting", 1, 1)
            came = Weights(
                given=self.given,
                version=None if self.given is not None and self.given.is_checkpoint else parts.generation.weight_version,
                fingerprint=parts.generation.weight_fingerprint(),
                transport=weights.transport_name,
            )
            collector = make_collector(config, parts.generation, parts.environments, self.tokenizer)
            return Evaluated(weights=came, passes=[self._ask(collector, asking, told) for asking in self.askings])

    def _ask(self, collector: Collector, asking: EvalMode, told: Told) -> Pass:
        started = time.perf_counter()
        evaluation = Evaluation(
            collector=collector,
            prompts=self.prompts,
            max_samples=self.loaded.run.algorithm.max_val_samples,
            samples_per_prompt=asking.samples_per_prompt,
            greedy=asking.greedy,
        )
        told(asking.name, 0, evaluation.num_prompts)
        rows = evaluation.play(lambda done: told(asking.name, done, evaluation.num_prompts))
        judgement = judge(rows, collector.environments, reward_above=self.reward_above)
        groups = grouped(rows, judgement, samples_per_prompt=asking.samples_per_prompt)
        own = ask_environments(rows, collector.environments)
        whole = score(groups, judgement, ks=asking.ks)
        tasks = dict.fromkeys(group.task_name for group in groups)
        of_task = {task: [group for group in groups if group.task_name == task] for task in tasks}
        return Pass(
            asking=asking,
            scores=whole,
            by_task={task: score(of, judgement, ks=asking.ks) for task, of in of_task.items()},
            by_dataset={self.dataset_name: whole},
            environment={name: value for name, value in own.items() if name.startswith("env/")},
            groups=groups,
            seconds=time.perf_counter() - started,
        )


def plan_evaluation(
    config_path: Path | str,
    overrides: Sequence[str] = (),
    *,
    checkpoint: Path | None = None,
    best: bool = False,
    samples: int | None = None,
    greedy: bool = False,
    ks: Sequence[int] = (),
    reward_above: float | None = None,
) -> EvaluationPlan:
    """Read a config, the weights' place, the tokenizer and the validation data; starts nothing.

    Args:
        config_path: the YAML file.
        overrides: `key=value` each.
        checkpoint: see `find_weights`; the config's own model by default.
        best: of a run folder, its best checkpoint and not its newest.
        samples: sample each prompt so many times.
        greedy: ask each prompt greedily, once; with `samples`, both. Without either, prompts are asked as the config validates.
        ks: the k of pass@k and cons@k; powers of two by default.
        reward_above: a sample is right where its reward is above it; by default where its environment says so.

    Raises:
        ConfigError: the config cannot be honoured, has nothing to evaluate with, or a k is beyond the samples.
        CheckpointError: there are no weights at `checkpoint`.
    """
    if best and checkpoint is None:
        raise ConfigError("--best chooses among the checkpoints of a run: name the run folder with --checkpoint.")
    manager = discover()
    registry = Registry(manager)
    given = find_weights(checkpoint, best=best) if checkpoint is not None else None
    overrides = list(overrides)
    if given is not None and not given.is_checkpoint:
        quoted = str(given.path).replace("'", "''")
        overrides.append(f"policy.model_name='{quoted}'")
    loaded = load_config(config_path, overrides, registry=registry, for_training=False)
    config = loaded.run
    _refuse_what_cannot_be_asked(config)
    askings = _askings(config, samples=samples, greedy=greedy, ks=ks)
    tokenizer = load_policy_tokenizer(config.policy)
    _, source = read_data(
        config.data if config.data.split else config.data.model_copy(update={"train": None, "mix": {}}), registry
    )
    assert source is not None
    if len(source.records) and "messages" not in source.records[0]:
        raise ConfigError(
            f"data.validation ({source.name}) holds {', '.join(sorted(source.records[0]))} and no messages: pairs of answers, "
            "perhaps. An evaluation asks prompts and has an environment score the answers: name a dataset of prompts there."
        )
    prompts = prompt_loader(source, config, tokenizer, batch_size=config.algorithm.val_batch_size, shuffle=False)
    return EvaluationPlan(
        loaded=loaded,
        manager=manager,
        given=given,
        tokenizer=tokenizer,
        prompts=prompts,
        dataset_name=source.name,
        askings=askings,
        reward_above=reward_above,
    )


def _refuse_what_cannot_be_asked(config: RunConfig) -> None:
    if not config.data.has_validation_data:
        raise ConfigError("data.validation names no data to evaluate on. Add `data: {validation: {dataset_name: ...}}`.")
    if config.policy.generation is None or not config.env:
        raise ConfigError(
            "An evaluation samples and scores completions: the config needs `policy.generation` and a section in `env`, "
            "for example ++policy.generation.backend=hf and ++env.math.num_workers=1."
        )


def _askings(config: RunConfig, *, samples: int | None, greedy: bool, ks: Sequence[int]) -> list[EvalMode]:
    ways: list[tuple[bool, int]] = []
    if greedy:
        ways.append((True, 1))
    if samples is not None:
        ways.append((False, samples))
    if not ways:
        section = config.policy.generation
        as_validated = config.algorithm.runtime_needs.val_samples_per_prompt
        ways.append((section is not None and section.val_temperature == 0.0, as_validated))
    most = max(count for _, count in ways)
    wrong = [k for k in ks if not 1 <= k <= most]
    if wrong:
        raise ConfigError(
            f"--k {','.join(map(str, wrong))}: of {most} samples a prompt, 1 to {most} can be drawn. Take more with --samples."
        )
    return [
        EvalMode(
            greedy=is_greedy,
            samples_per_prompt=count,
            ks=tuple(sorted({k for k in ks if k <= count})) or usual_ks(count),
        )
        for is_greedy, count in ways
    ]
