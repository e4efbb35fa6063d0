"""Evaluates a config's model, or a checkpoint of it, on the validation data, and runs all diagnoses of a config."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl_core.data.process_seed import seed_process
from rl_core.dispatch.worker_facade import WorkerFacade
from rl_core.errors import ConfigError, NotSupportedError, WeightSyncError
from rl_core.interfaces.environment import EnvironmentInterface
from rl_core.interfaces.generation import GenerationInterface
from rl_core.plugins.component import did_you_mean
from rl_core.plugins.manager import PluginManager, discover
from rl_core.plugins.registry import Registry
from rl_train.assembly.error_locations import with_location
from rl_train.assembly.parts import make_collector
from rl_train.assembly.preparation import Preparation, inputs_of
from rl_train.assembly.rules import check_before_start
from rl_train.assembly.rules.run_facts import RunFacts
from rl_train.assembly.run_assembly import PolicyAndEngine, PolicyAndEnginePlan
from rl_train.assembly.weights import make_weights
from rl_train.assembly.workers import Builder
from rl_train.checkpoints.inputs import input_changes, inputs_in
from rl_train.checkpoints.manifest import read_state
from rl_train.config.loader import LoadedConfig, load_config
from rl_train.config.rules.components import sections_of
from rl_train.config.rules.rollouts import declares_own_weights
from rl_train.config.rules.rule import CheckedConfig, Use
from rl_train.config.schema import RunConfig
from rl_train.config.slots import COMPANIONS
from rl_train.config.sources import ConfigFiles
from rl_train.data.dataloader import BatchedDataLoader
from rl_train.diagnostics.chat_template import check_chat_template
from rl_train.diagnostics.decoding import (
    USUAL_ERROR,
    check_decode_against_prefill,
    check_engine_against_policy,
    check_length_limit,
)
from rl_train.diagnostics.diagnosis import Diagnosis, DiagnosisStatus
from rl_train.diagnostics.embeddings import check_tied_embeddings, check_token_rows, check_untrained_embeddings, read_embeddings
from rl_train.diagnostics.model_files import ModelFiles, read_model_files
from rl_train.logprob_agreement import LogProbabilityAgreement, compare_log_probabilities
from rl_train.rollouts.collect import Collector
from rl_train.rollouts.environment_pool import refuse_any_failure
from rl_train.rollouts.evaluation import Evaluation, Group, Scores, correct_rollouts, default_ks, grouped, score
from rl_train.rollouts.records import environment_metrics
from rl_train.run_folders.checkpoint_paths import CheckpointPaths, find_weights

_SCORING = ("env.", "policy.tokenizer", "data.prompt")
"""Prefixes of the keys of user code, templates and prompts that an evaluation depends on."""
ProgressCallback = Callable[[str, int, int], None]
"""Called with the name of the current phase, the number of finished items and their total."""


@dataclass(frozen=True, kw_only=True)
class EvalMode:
    """How completions are sampled: greedily, or several per prompt."""

    greedy: bool
    """Greedy decoding."""
    samples_per_prompt: int
    """Number of samples per prompt, n."""
    ks: tuple[int, ...]
    """The k of pass@k and cons@k."""

    @property
    def name(self) -> str:
        """`greedy` or `sampled`."""
        return "greedy" if self.greedy else "sampled"


@dataclass(frozen=True, kw_only=True)
class ModeResult:
    """The results of one evaluation mode."""

    mode: EvalMode
    scores: Scores
    by_task: dict[str, Scores]
    by_dataset: dict[str, Scores]
    environment: dict[str, float]
    """The environments' own metrics, `env/<task>/<name>`."""
    groups: list[Group]
    """All prompts with their samples."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class EvaluatedWeights:
    """The evaluated weights, as verified in the engine; those of an engine with its own weights are not known."""

    checkpoint: CheckpointPaths | None
    """The checkpoint or model that the user gave; None for the config's model."""
    version: int | None
    """Their weight version; None for a checkpoint, because its training state, which has the version, is not loaded."""
    fingerprint: str | None
    """Fingerprint of the engine's weights; equal for equal weights and dtypes."""
    transport: str | None
    """The weight transport to the engine; None if the engine has its own weights."""


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The result of an evaluation."""

    weights: EvaluatedWeights
    passes: list[ModeResult]


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """An evaluation whose inputs are loaded and checked; no process is started yet.

    Attributes:
        loaded: the config.
        manager: the plugins of this process.
        checkpoint: the checkpoint or model that replaces the config's model.
        prepared: tokenizer and tools.
        prompts: the validation data.
        dataset_name: its dataset component, or the members of the mixture that it was held out of.
        validation_set: name of the data in `data.validation_sets`; None for `data.validation`.
        modes: the evaluation modes, run one after the other.
        changed_code: the environments, prompts and templates that differ from those of the checkpoint's run, in words by key.
        reward_above: reward threshold for a correct sample, instead of the environment's own; see
            `rl_train.rollouts.evaluation.correct_rollouts`.
    """

    loaded: LoadedConfig
    manager: PluginManager
    checkpoint: CheckpointPaths | None
    prepared: Preparation
    prompts: BatchedDataLoader
    dataset_name: str
    validation_set: str | None
    modes: Sequence[EvalMode]
    changed_code: Mapping[str, str]
    reward_above: float | None

    def evaluate(self, progress: ProgressCallback = lambda *_: None) -> EvaluationResult:
        """Start policy, engine and environments, sync the weights once, run every mode, and stop all processes.

        An engine with its own weights is evaluated without a policy.

        Args:
            progress: called to report progress.

        Raises:
            CheckpointError: the checkpoint cannot be read, or belongs to another model.
            WeightSyncError: the engine's weights could not be verified.
        """
        with ExitStack() as exits:
            progress("starting", 0, 1)
            builder = Builder.without_training(self.loaded.run, self.prepared.registry, exits)
            generation, environments, weights = self._start_engine(builder)
            progress("starting", 1, 1)
            collector = make_collector(builder, self.prepared, generation, environments)
            return EvaluationResult(weights=weights, passes=[self._run_mode(collector, mode, progress) for mode in self.modes])

    def _start_engine(
        self, builder: Builder
    ) -> tuple[GenerationInterface, Mapping[str, EnvironmentInterface], EvaluatedWeights]:
        section = builder.run.policy.generation
        assert section is not None
        if declares_own_weights(section, builder.registry):
            engine_weights = EvaluatedWeights(checkpoint=None, version=None, fingerprint=None, transport=None)
            environments = builder.environments()
            return builder.generation(), environments, engine_weights
        workers = builder.start(samples=True)
        assert workers.generation is not None
        if self.checkpoint is not None and self.checkpoint.is_checkpoint:
            workers.policy.load_checkpoint(self.checkpoint.weights)
        weights = make_weights(builder, workers.policy, workers.generation, self.prepared.tokenizer)
        weights.sync()
        synced = EvaluatedWeights(
            checkpoint=self.checkpoint,
            version=None
            if self.checkpoint is not None and self.checkpoint.is_checkpoint
            else workers.generation.weight_version,
            fingerprint=workers.generation.weight_fingerprint(),
            transport=weights.transport_name,
        )
        return workers.generation, workers.environments, synced

    def _run_mode(self, collector: Collector, mode: EvalMode, progress: ProgressCallback) -> ModeResult:
        started = time.perf_counter()
        seed_process(self.loaded.run.algorithm.seed)  # for an engine in this process that does not read the seeds of rows
        evaluation = Evaluation(
            collector=collector,
            prompts=self.prompts,
            max_samples=self.loaded.run.algorithm.max_val_samples,
            samples_per_prompt=mode.samples_per_prompt,
            greedy=mode.greedy,
        )
        progress(mode.name, 0, evaluation.num_prompts)
        rows = evaluation.play(lambda done: progress(mode.name, done, evaluation.num_prompts))
        refuse_any_failure(rows)
        correctness = correct_rollouts(rows, collector.environments, reward_above=self.reward_above)
        groups = grouped(rows, correctness, samples_per_prompt=mode.samples_per_prompt)
        environment = environment_metrics(rows, collector.environments)
        scores = score(groups, correctness, ks=mode.ks)
        tasks = dict.fromkeys(group.task_name for group in groups)
        groups_by_task = {task: [group for group in groups if group.task_name == task] for task in tasks}
        return ModeResult(
            mode=mode,
            scores=scores,
            by_task={task: score(of_task, correctness, ks=mode.ks) for task, of_task in groups_by_task.items()},
            by_dataset={self.dataset_name: scores},
            environment={name: value for name, value in environment.items() if name.startswith("env/")},
            groups=groups,
            seconds=time.perf_counter() - started,
        )


def plan_evaluation(
    config_path: ConfigFiles,
    overrides: Sequence[str] = (),
    *,
    validation_set: str | None = None,
    checkpoint: Path | None = None,
    best: bool = False,
    samples: int | None = None,
    greedy: bool = False,
    ks: Sequence[int] = (),
    reward_above: float | None = None,
) -> EvaluationPlan:
    """Load the config, the tokenizer and the validation data, and find the weights. Does not start processes.

    Args:
        config_path: the YAML file, or several that are layered, the last one on top.
        overrides: `key=value` each.
        validation_set: name in `data.validation_sets`; `data.validation` by default.
        checkpoint: see `find_weights`; the config's model by default.
        best: for a run folder, use its best checkpoint instead of the newest.
        samples: number of samples per prompt.
        greedy: decode each prompt once, greedily; with `samples`, do both. Without either, sample as in validation.
        ks: the k of pass@k and cons@k; powers of two by default.
        reward_above: a sample with a higher reward is correct; by default the environment decides.

    Raises:
        ConfigError: the config is invalid, has no engine, environment or data, or a k exceeds the samples.
        CheckpointError: there are no weights at `checkpoint`.
    """
    if best and checkpoint is None:
        raise ConfigError("--best chooses among the checkpoints of a run: give the run folder with --checkpoint.")
    manager = discover()
    registry = Registry(manager)
    paths = find_weights(checkpoint, best=best) if checkpoint is not None else None
    overrides = list(overrides)
    if paths is not None and not paths.is_checkpoint:
        quoted = str(paths.path).replace("'", "''")
        overrides.append(f"policy.model_name='{quoted}'")
    loaded = load_config(config_path, overrides, registry=registry, use=Use.EVAL)
    config = loaded.run
    _check_requirements(config, validation_set)
    modes = _eval_modes(config, samples=samples, greedy=greedy, ks=ks)
    facts = _facts(loaded, validation_set, registry)
    with with_location(loaded):
        check_before_start(facts)
    _check_whose_weights(facts, checkpoint)
    config, prepared, name = facts.run, facts.prepared, validation_set or ""
    if paths is not None:
        config = config.model_copy(update={"policy": paths.policy_to_load(config.policy)})
    source = prepared.data.validation[name]
    trained_with = inputs_in(read_state(paths.path)) if paths is not None and paths.is_checkpoint else {}
    return EvaluationPlan(
        loaded=replace(loaded, run=prepared.with_completion_formats(config)),
        manager=manager,
        checkpoint=paths,
        prepared=prepared,
        prompts=prepared.loaders.validation_prompts[name],
        dataset_name=source.component or source.name,
        validation_set=validation_set,
        modes=modes,
        changed_code=input_changes(trained_with, inputs_of(loaded, prepared, only=_SCORING) if trained_with else {}),
        reward_above=reward_above,
    )


def _facts(loaded: LoadedConfig, validation_set: str | None, registry: Registry) -> RunFacts:
    """What an evaluation uses: the config without companion models, and without data that is not read."""
    config = loaded.run
    unused: dict[str, Any] = {"validation_sets": {}}
    if validation_set is not None:
        unused = {"validation_sets": {validation_set: config.data.validation_sets[validation_set]}, "validation": None}
    if validation_set is not None or config.data.split is None:
        unused |= {"split": None, "train": None, "mix": {}}
    run = config.model_copy(update={"data": config.data.model_copy(update=unused), **dict.fromkeys(COMPANIONS), "teachers": {}})
    sections = {path: loaded.layout.sections[path] for path, _ in sections_of(run, trains=False)}
    checked = CheckedConfig(run=run, registry=registry, use=Use.EVAL, layout=replace(loaded.layout, sections=sections))
    return RunFacts.of(checked, located=loaded, prepared=Preparation(run, registry, datasets=run.data))


def _check_requirements(config: RunConfig, validation_set: str | None) -> None:
    named = sorted(config.data.validation_sets)
    if validation_set is not None and validation_set not in named:
        raise ConfigError(
            f"--validation-set {validation_set}: data.validation_sets has {', '.join(named) or 'no sets'}."
            f"{did_you_mean(validation_set, named)}"
        )
    if validation_set is None and config.data.validation is None and config.data.split is None:
        choose = f" Or choose one of data.validation_sets with --validation-set: {', '.join(named)}." if named else ""
        raise ConfigError(f"data.validation is required. Add `data: {{validation: {{dataset_name: ...}}}}`.{choose}")


def _check_whose_weights(facts: RunFacts, checkpoint: Path | None) -> None:
    section = facts.run.policy.generation
    if checkpoint is not None and section is not None and not facts.starts_policy:
        raise ConfigError(
            f"--checkpoint {checkpoint}: the engine {section.backend!r} has its own weights and cannot receive those of a "
            "checkpoint. Remove --checkpoint, or choose another policy.generation.backend."
        )


def _eval_modes(config: RunConfig, *, samples: int | None, greedy: bool, ks: Sequence[int]) -> list[EvalMode]:
    sampling: list[tuple[bool, int]] = []
    if greedy:
        sampling.append((True, 1))
    if samples is not None:
        sampling.append((False, samples))
    if not sampling:
        section = config.policy.generation
        val_samples = config.algorithm.runtime_needs.val_samples_per_prompt
        sampling.append((section is not None and section.val_temperature == 0.0, val_samples))
    most = max(count for _, count in sampling)
    invalid = [k for k in ks if not 1 <= k <= most]
    if invalid:
        raise ConfigError(
            f"--k {','.join(map(str, invalid))}: k must be from 1 to {most}, the number of samples per prompt. Raise --samples."
        )
    return [
        EvalMode(
            greedy=is_greedy,
            samples_per_prompt=count,
            ks=tuple(sorted({k for k in ks if k <= count})) or default_ks(count),
        )
        for is_greedy, count in sampling
    ]


@dataclass(frozen=True, kw_only=True)
class MeasuredAgreement:
    """Log-probability agreement of engine and policy after one refit.

    Attributes:
        config: with the values that were chosen for the devices.
        refit: see `PolicyAndEngine`.
        precision: of the engine; see `PolicyAndEngine.engine_precision`.
        agreement: on samples from the plan's prompts.
        adapters_are_zero: see `PolicyAndEngine.adapters_are_zero`.
    """

    config: RunConfig
    refit: str
    precision: str
    agreement: LogProbabilityAgreement
    adapters_are_zero: bool


def measure_agreement(plan: PolicyAndEnginePlan) -> MeasuredAgreement:
    """Start policy and engine, and compare the log-probabilities of what the engine samples."""
    with plan.started() as pair:
        return MeasuredAgreement(
            config=pair.config,
            refit=pair.refit,
            precision=pair.engine_precision(),
            agreement=compare_log_probabilities(pair.policy, pair.generation, plan.prompts.batch),
            adapters_are_zero=pair.adapters_are_zero(),
        )


def usual_error(pair: PolicyAndEngine) -> float:
    """Largest usual exp(mean |d|) for the dtypes of policy and engine."""
    types = {pair.config.policy.dtype_name, *pair.engine_precision().split(", ")}
    return max(USUAL_ERROR.get(name, USUAL_ERROR["bfloat16"]) for name in types)


def diagnose(plan: PolicyAndEnginePlan) -> Iterator[Diagnosis]:
    """Yields each diagnosis when it is done; those without a worker process come first.

    Raises:
        RLCoreError: a backend failed, so no diagnosis is possible.
    """
    files = read_model_files(plan.config.policy.model_name, plan.tokenizer)
    section = plan.config.policy.generation
    assert section is not None
    yield from check_chat_template(
        plan.tokenizer,
        plan.prompts.questions[0],
        stop_ids=files.end_ids | set(section.stop_token_ids or ()),
        stop_strings=section.stop_strings or (),
    )
    with plan.started() as pair:
        yield from _check_embeddings(pair, plan, files)
        threshold = usual_error(pair)
        yield check_length_limit(pair.generation, plan.prompts.token_ids(), limit=_limit(pair))
        yield check_decode_against_prefill(pair.generation, plan.prompts.batch, threshold=threshold)
        yield check_engine_against_policy(pair.policy, pair.generation, plan.prompts.batch, threshold=threshold)


def _check_embeddings(pair: PolicyAndEngine, plan: PolicyAndEnginePlan, files: ModelFiles) -> Iterator[Diagnosis]:
    try:
        weights = read_embeddings(pair.policy, by_reference=pair.by_reference)
    except (NotSupportedError, WeightSyncError) as error:
        yield Diagnosis(
            name="embeddings",
            status=DiagnosisStatus.WARNING,
            found=f"the policy's embeddings could not be read: {error}",
            why="Whether their rows were trained, and whether they are tied, is unknown.",
            remedy="Runs do not need them; only this check does, which knows the names that Transformers gives to embeddings."
            if isinstance(error, NotSupportedError)
            else "Diagnose on the node where the policy's rank 0 runs.",
        )
        return
    used = {int(token) for row in plan.prompts.token_ids() for token in row}
    yield check_token_rows(weights.input, tokenizer=plan.tokenizer, used_ids=used)
    yield check_untrained_embeddings(weights.input, tokenizer=plan.tokenizer, used_ids=used)
    yield check_tied_embeddings(weights, declared=files.tie_word_embeddings)


def _limit(pair: PolicyAndEngine) -> int:
    """The length limit of the config: the smaller of the limits of policy and engine."""
    limit = pair.config.policy.max_total_sequence_length
    facts = pair.generation.facts if isinstance(pair.generation, WorkerFacade) else {}
    return min(limit, int(facts.get("max_model_len", limit)))
