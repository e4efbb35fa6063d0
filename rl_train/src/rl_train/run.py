"""Run: the components that an algorithm receives."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.data.process_seed import seed_process
from rl_core.dispatch.facades import PolicyFacade
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.policy import ColocatablePolicyInterface, LossFunction, ValueInterface
from rl_train.checkpoints.state import Checkpoints, Stateful
from rl_train.checkpoints.store import TimeLimit
from rl_train.config.schema import RunConfig
from rl_train.control import RunControl
from rl_train.errors import RunInterrupted, StopReason
from rl_train.garbage_collection import rare_full_collections
from rl_train.metrics.logger import Logger, Timeline
from rl_train.metrics.measured import ModelFlops, Recorder, profiled
from rl_train.metrics.run_warnings import RunWarnings
from rl_train.rollouts.activity import ENGINE, ActivityLog
from rl_train.rollouts.advantages import AdvantageEstimator
from rl_train.rollouts.batches import TrainingBatches
from rl_train.rollouts.evaluation import Evaluation, ValidationSet
from rl_train.rollouts.source import RolloutSource
from rl_train.rollouts.teacher_rows import TeacherPrompts
from rl_train.rollouts.trajectory import Trajectory, join_segments
from rl_train.weight_sync.device_memory import DeviceMemory
from rl_train.weight_sync.synchronizer import NoEngine, WeightSynchronizer

_log = logging.getLogger("rlcore")


@dataclass(kw_only=True)
class Run:
    """The components of a run. Those that the config does not use are None."""

    config: RunConfig
    """The whole config, frozen."""
    folder: Path
    """The run folder."""
    policy: ColocatablePolicyInterface
    """The model being trained."""
    loss_fn: LossFunction
    """The loss of `loss_fn:`."""
    loggers: Sequence[Logger]
    """Loggers of metrics and rollouts."""
    checkpoints: Checkpoints | None
    """Saves and restores checkpoints; None if `checkpointing.enabled` is false."""
    tokenizer: Any
    """The policy's tokenizer."""
    value: ValueInterface | None = None
    """The critic, trained together with the policy."""
    teacher: ColocatablePolicyInterface | None = None
    """Teacher model. Frozen and offloaded to CPU memory when idle, or the policy itself."""
    teachers: Mapping[str, ColocatablePolicyInterface] = field(default_factory=dict)
    """Instead of `teacher`, the teacher of each task; tasks may share one."""
    teacher_prompts: TeacherPrompts | None = None
    """Writes the prompts of the teacher; None if it reads those of the policy."""
    generation: GenerationInterface | None = None
    """The engine that samples."""
    weights: WeightSynchronizer | NoEngine | None = None
    """Sends the policy's weights to the engine and verifies them."""
    memory: DeviceMemory | None = None
    """The device memory that policy, companion models and engine share; None if the policy has it alone."""
    rollouts: RolloutSource | None = None
    """Source of rollouts."""
    activities: ActivityLog | None = None
    """What the rollouts in progress wait for; None without an engine."""
    batches: TrainingBatches | None = None
    """Source of supervised batches."""
    validation_sets: Sequence[ValidationSet] = ()
    """Validation data: that of `data.validation` first, then `data.validation_sets`."""
    first_step: int = 0
    """Number of steps done before a resume; 0 in a new run."""
    initial_metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the whole run, such as those of its data; logged with its first step, and not after a resume."""
    metrics: Recorder = field(default_factory=Recorder)
    """The metrics of the current step."""
    warnings: RunWarnings = field(default_factory=RunWarnings)
    """Warns once about each sign that the run will not get better."""
    on_step: Callable[[int, Mapping[str, float]], None] | None = None
    """Called with the metrics of each step after they are logged."""
    on_rollouts: Callable[[Sequence[Mapping[str, Any]], int], None] | None = None
    """Called with the records of all rollouts of a step, and the step."""
    stop_reason: StopReason | None = None
    """Set by a signal or the time limit: the run ends after this step, with a checkpoint."""
    time_limit: TimeLimit | None = None
    """`checkpointing.max_time`; None without a limit."""
    control: RunControl = field(default_factory=RunControl, init=False)
    """What plugins and callbacks have changed."""
    step: int = field(default=0, init=False)
    """The current step; 0 before the first."""
    flops: ModelFlops | None = None
    """FLOPs of the policy's training; None if its workers do not report them."""
    estimator: AdvantageEstimator | None = field(default=None, init=False)
    """Estimates advantages; None if the algorithm's section has no `adv_estimator`."""
    trajectories: Sequence[Trajectory] = field(default=(), init=False)
    """The rollouts of the current step as conversations."""
    _training: Mapping[str, Any] = field(default_factory=dict, init=False)
    """The result of this step's training."""
    _logged_restarts: int = field(default=0, init=False)

    @property
    def data_ranks(self) -> int:
        """Number of data-parallel ranks of the policy, which has its own placement if it was created in Python."""
        if isinstance(self.policy, PolicyFacade):
            return self.policy.data_ranks
        return self.config.policy.data_ranks(self.config.cluster)

    def keep(self, name: str, component: Stateful) -> None:
        """Save additional state of the algorithm in every checkpoint, and restore it if the run is resumed.

        Args:
            name: unique name of the state.
            component: object with the state.
        """
        if self.checkpoints is not None:
            self.checkpoints.keep(name, component)

    def free_memory_for(self, model: object) -> None:
        """Let the engine sleep and offload all models but `model`, which then has the device memory that they share.

        Call it between phases that use different models; `weights.sync` frees it for the engine. No rollout may be in progress.
        """
        if self.memory is not None:
            self.memory.free_for_model(model)

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Record how long a block takes, as `time/<phase>_s`, and its memory, as `memory/<phase>_gib`."""
        return self.metrics.timed(phase)

    def steps(self) -> Iterator[int]:
        """The remaining steps, numbered from 1. After each, metrics are logged and a checkpoint is saved if one is due.

        They end early if a control stops the run.

        Raises:
            RunInterrupted: a signal or the time limit; the step was finished and, with checkpointing, saved.
        """
        with rare_full_collections():
            yield from self._steps()

    def _steps(self) -> Iterator[int]:
        last = self.config.algorithm.max_num_steps
        if self.control.is_due:  # asked for after the validation before the first step
            self._save(0, {})
        for step in range(self.first_step + 1, last + 1) if self.control.stopped is None else ():
            self.step, started = step, time.perf_counter()
            if self.metrics.memory is not None:
                self.metrics.memory.start()
            seed_process(self.config.algorithm.seed, step)  # of each step, so that a resumed run draws the same numbers
            with profiled(step, self.config.profiling, self.folder):
                yield step
                ended = time.perf_counter()
                self.metrics.add({"time/step_s": ended - started})
            self.metrics.add(self._throughput() | self.control.metrics())
            timeline = self._timeline(started, ended)
            numbers = self._numbers()
            self._report_or_save(numbers, step, timeline)
            self._watch_time(started)
            due = step % self.config.checkpointing.save_period == 0 or step == last or self.stop_reason is not None
            if due or self.control.is_due:
                self._save(step, numbers)
            if self.control.stopped is not None:
                return
            if self.stop_reason is not None and step < last:
                raise RunInterrupted(step, self.checkpoints is not None, self.stop_reason)

    def _save(self, step: int, numbers: Mapping[str, float]) -> None:
        if self.checkpoints is None:
            return
        saving = time.perf_counter()
        self.metrics.progress.begin("checkpoint")
        self.checkpoints.save(step, numbers)
        self.metrics.progress.end(None)
        if self.time_limit is not None:
            self.time_limit.count_save(time.perf_counter() - saving)

    def _watch_time(self, step_started: float) -> None:
        if self.time_limit is None:
            return
        now = time.perf_counter()
        self.time_limit.count_step(now - step_started)
        if not self.time_limit.allows_step(now) and self.stop_reason is None:
            self.stop_reason = StopReason.MAX_TIME

    def _throughput(self) -> dict[str, float]:
        """Tokens per second of the step, including prompts and excluding validation time, and FLOP/s of its training."""
        now = self.metrics.peek()
        if "tokens/all" not in now:
            return {}
        speed = {"tokens_per_s": now["tokens/all"] / (now["time/step_s"] - now.get("time/validate_s", 0.0))}
        if self.flops is not None and "time/train_s" in now:
            speed |= self.flops.metrics(self._training, now["time/train_s"])
        return speed

    def _timeline(self, started: float, ended: float) -> Timeline | None:
        """The timeline of the step, whose idle fractions become metrics; None without an engine."""
        if self.activities is None:
            return None
        timeline = self.activities.timeline(self.metrics.spans, started, ended)
        waited = sum(end - start for name, start, end in timeline.phases if name == "rollout")
        idle = self.activities.idle_s(ENGINE, started, ended)
        self.metrics.add({"trainer/idle_frac": waited / timeline.seconds, "engine/idle_frac": idle / timeline.seconds})
        self.activities.forget_before(ended)
        return timeline

    @property
    def evaluation(self) -> Evaluation | None:
        """Evaluation on the prompts of `data.validation`; None if there is none."""
        return next((each.evaluation for each in self.validation_sets if not each.name), None)

    def validation_due(self, step: int) -> list[ValidationSet]:
        """The validation sets on which validation is due after `step` steps (0: before the first step)."""
        config = self.config.algorithm
        if step == 0:
            return list(self.validation_sets) if config.val_at_start and self.first_step == 0 else []
        if config.val_at_end and step == config.max_num_steps:
            return list(self.validation_sets)
        return [each for each in self.validation_sets if each.val_period > 0 and step % each.val_period == 0]

    def flush(self, step: int) -> dict[str, float]:
        """Log the metrics of a step."""
        numbers = self._numbers()
        self._report(numbers, step)
        return numbers

    def _report_or_save(self, numbers: Mapping[str, float], step: int, timeline: Timeline | None) -> None:
        """Log the metrics of a finished step; if a logger, plugin or callback raises, it is saved before the run ends."""
        try:
            if timeline is not None:
                for logger in self.loggers:
                    logger.log_timeline(timeline, step)
            self._report(numbers, step)
        except Exception:
            if self.checkpoints is not None:
                _log.warning(
                    "a logger, plugin or callback failed after step %d; its checkpoint is saved before the run ends", step
                )
                self.checkpoints.save(step, numbers)
            raise

    def _report(self, numbers: Mapping[str, float], step: int) -> None:
        for logger in self.loggers:
            logger.log_metrics(numbers, step)
        self.warnings.observe(step, numbers)
        if self.on_step is not None:
            self.on_step(step, numbers)

    def _numbers(self) -> dict[str, float]:
        """The metrics of the step, which are then empty."""
        if self.first_step == 0:
            self.metrics.add(self.initial_metrics)
        self.initial_metrics = {}
        if self.generation is not None:
            self.metrics.add({"generation/restarts": self.generation.restarts - self._logged_restarts})
            self._logged_restarts = self.generation.restarts
        return self.metrics.flush()

    def log_rollouts(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Log rollouts, at most `logger.num_rollouts_logged`."""
        if self.on_rollouts is not None:
            self.on_rollouts(rows, step)
        limit = self.config.logger.num_rollouts_logged
        for logger in self.loggers:
            logger.log_rollouts(rows[:limit], step)

    def record_training(self, result: Mapping[str, Any], batch: BatchedDataDict[Any]) -> None:
        """Record the result of `PolicyInterface.train` and the number of tokens."""
        self._training = result
        self.metrics.add({name: result[name] for name in ("loss", "grad_norm", "lr", "num_optimizer_steps")})
        self.metrics.add({f"lr/{name}": lr for name, lr in result.get("group_lrs", {}).items()})
        self.metrics.add(self.loss_fn.reported_metrics(result["metrics"]))
        self.metrics.add({"tokens/trained": result["global_valid_toks"], "tokens/all": int(batch["input_lengths"].sum())})
        self.metrics.add({"tokens/skipped": result.get("skipped_valid_toks", 0.0)})
        dropped = int((join_segments(batch)["sample_mask"] == 0).sum())
        if dropped:
            self.metrics.add({"data/dropped_rows": dropped})
