"""Run: the assembled parts that an algorithm receives; it builds none of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_core.config.schema import RunConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import RunInterrupted, StopReason
from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.logger import Logger
from rl_core.interfaces.loss import LossFunction
from rl_core.interfaces.policy import ColocatablePolicyInterface
from rl_core.interfaces.value import ValueInterface
from rl_core.weights.synchronizer import WeightSynchronizer
from rl_train.checkpoints.state import Checkpoints, Stateful
from rl_train.checkpoints.time_limit import TimeLimit
from rl_train.metrics.recorder import Recorder
from rl_train.rollouts.batches import TrainingBatches
from rl_train.rollouts.evaluate import Evaluation
from rl_train.rollouts.source import RolloutSource


@dataclass(kw_only=True)
class Run:
    """What an algorithm works with. Parts that its config does not ask for are None."""

    config: RunConfig
    """The whole config, frozen."""
    folder: Path
    """The run folder."""
    policy: ColocatablePolicyInterface
    """The model being trained."""
    loss_fn: LossFunction
    """The loss of `loss_fn:`."""
    loggers: Sequence[Logger]
    """Where metrics go."""
    checkpoints: Checkpoints | None
    """Saves and restores; None where `checkpointing.enabled` is false."""
    tokenizer: Any
    """The policy's."""
    value: ValueInterface | None = None
    """The critic: trained beside the policy."""
    teacher: ColocatablePolicyInterface | None = None
    """Who is learnt from; its weights never change, and rest in CPU memory while it is not asked."""
    generation: GenerationInterface | None = None
    """The engine that samples."""
    weights: WeightSynchronizer | None = None
    """Brings the policy's weights to the engine, and proves it."""
    rollouts: RolloutSource | None = None
    """Where rollouts come from."""
    batches: TrainingBatches | None = None
    """Where supervised batches come from."""
    validation_batches: TrainingBatches | None = None
    """Held-out supervised batches."""
    evaluation: Evaluation | None = None
    """Held-out prompts."""
    first_step: int = 0
    """Steps done before a resume."""
    initial_metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the whole run, such as those of its data; they go into its first line, and into none after a resume."""
    metrics: Recorder = field(default_factory=Recorder)
    """The numbers of the current step."""
    on_step: Callable[[int, Mapping[str, float]], None] | None = None
    """Told of each step's numbers, once they are flushed."""
    stop_reason: StopReason | None = None
    """Set by a signal or the time limit: the run ends after this step, with a checkpoint."""
    time_limit: TimeLimit | None = None
    """`checkpointing.max_time`; None without a limit."""
    _restarts_told: int = field(default=0, init=False)

    def keep(self, name: str, part: Stateful) -> None:
        """Keep what an algorithm has of its own with every checkpoint; of a resumed run, bring it to where it was.

        Args:
            name: tells it from the algorithm's other parts.
            part: has a position that the next steps depend on.
        """
        if self.checkpoints is not None:
            self.checkpoints.keep(name, part)

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Record how long a block takes, as `time/<phase>_s`."""
        return self.metrics.timed(phase)

    def steps(self) -> Iterator[int]:
        """The steps still to be done, numbered from 1; between two, the numbers are flushed and a checkpoint is made.

        Raises:
            RunInterrupted: a signal came or the time is up; the step was finished and its checkpoint written.
        """
        last = self.config.algorithm.max_num_steps
        for step in range(self.first_step + 1, last + 1):
            started = time.perf_counter()
            yield step
            self.metrics.add({"time/step_s": time.perf_counter() - started})
            self.metrics.add(self._throughput())
            numbers = self.flush(step)
            self._watch_time(started)
            due = step % self.config.checkpointing.save_period == 0 or step == last or self.stop_reason is not None
            if self.checkpoints is not None and due:
                saving = time.perf_counter()
                self.checkpoints.save(step, numbers)
                if self.time_limit is not None:
                    self.time_limit.count_save(time.perf_counter() - saving)
            if self.stop_reason is not None and step < last:
                raise RunInterrupted(step, self.checkpoints is not None, self.stop_reason)

    def _watch_time(self, step_started: float) -> None:
        if self.time_limit is None:
            return
        now = time.perf_counter()
        self.time_limit.count_step(now - step_started)
        if not self.time_limit.allows_step(now) and self.stop_reason is None:
            self.stop_reason = StopReason.MAX_TIME

    def _throughput(self) -> dict[str, float]:
        """Tokens of the step's rows, prompts included, by the seconds of the step without its validation."""
        now = self.metrics.peek()
        seconds = now["time/step_s"] - now.get("time/validate_s", 0.0)
        return {"tokens_per_s": now["tokens/all"] / seconds} if "tokens/all" in now else {}

    def validation_due(self, step: int) -> bool:
        """Whether the config asks for a validation after `step` steps (0: before the first)."""
        config = self.config.algorithm
        if step == 0:
            return config.val_at_start and self.first_step == 0
        at_period = config.val_period > 0 and step % config.val_period == 0
        return at_period or (config.val_at_end and step == config.max_num_steps)

    def flush(self, step: int) -> dict[str, float]:
        """Hand the step's numbers to every logger."""
        if self.first_step == 0:
            self.metrics.add(self.initial_metrics)
        self.initial_metrics = {}
        if self.generation is not None:
            self.metrics.add({"generation/restarts": self.generation.restarts - self._restarts_told})
            self._restarts_told = self.generation.restarts
        numbers = self.metrics.flush()
        for logger in self.loggers:
            logger.log_metrics(numbers, step)
        if self.on_step is not None:
            self.on_step(step, numbers)
        return numbers

    def log_rollouts(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Hand rollouts to every logger."""
        limit = self.config.logger.num_rollouts_logged
        for logger in self.loggers:
            logger.log_rollouts(rows[:limit], step)

    def record_training(self, result: Mapping[str, Any], batch: BatchedDataDict[Any]) -> None:
        """Record what `PolicyInterface.train` returned, and how many tokens it was."""
        self.metrics.add({name: result[name] for name in ("loss", "grad_norm", "lr", "num_optimizer_steps")})
        self.metrics.add(result["metrics"])
        self.metrics.add({"tokens/trained": result["global_valid_toks"], "tokens/all": int(batch["input_lengths"].sum())})
        dropped = int((batch["sample_mask"] == 0).sum())
        if dropped:
            self.metrics.add({"data/dropped_rows": dropped})
