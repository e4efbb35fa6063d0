"""The source of rollouts that samples, also during training: groups begin and make up batches as the schedule allows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rl_core.errors import CheckpointError, ConfigError, RLCoreError
from rl_core.plugins.component import did_you_mean
from rl_train.data.dataloader import BatchedDataLoader
from rl_train.data.prompt_sampler import SampledPrompts
from rl_train.rollouts.collect import Collector
from rl_train.rollouts.environment_pool import FailureLimit, refuse_total_failure
from rl_train.rollouts.records import (
    SavedGroup,
    environment_metrics,
    environment_times,
    equal_groups_frac,
    failure_metrics,
    load_groups,
    save_groups,
    summarize,
)
from rl_train.rollouts.schedule import DeliveredVersions, Schedule, refuse_other_versions, staleness_metrics
from rl_train.rollouts.source import (
    Rollouts,
    RolloutSource,
    Selection,
    compared_samples,
    is_baseline,
    start_rollouts,
)
from rl_train.rollouts.trajectory import SampleStream, Trajectory, to_batch

_log = logging.getLogger("rlcore")
_MAX_REPLACED = 10
"""A step fails once it has replaced this many times its groups."""


class ScheduledSource(RolloutSource):
    """Samples groups as the schedule allows: with staleness 0 while they are taken, otherwise also during training.

    Only the thread of the step loop begins groups and takes them; the rollouts run in the collector's event loop. A group with
    too few scored rows is replaced by one of the next prompt.

    Args:
        collector: plays the rollouts.
        prompts: the training prompts.
        schedule: which groups may begin and make up a batch.
        group_size: G, samples per prompt.
        weight_version: weight version of the engine, which it has since its last refit.
        trained_version: weight version of the policy; by default that of the engine.
        reward_names: rewards that may be missing in the first step, by task, see `EnvironmentConfig.reward_names`.
        min_scored: number of scored rows that a group needs.
        max_failed_share: see `rl_train.rollouts.environment_pool.FailureLimit`.
        sampled: chooses among the prompts; None for their own order.
        greedy_baseline: whether each group also has a greedy rollout, see `RolloutNeeds`. It must be scored as well.
    """

    def __init__(
        self,
        collector: Collector,
        prompts: BatchedDataLoader,
        *,
        schedule: Schedule,
        group_size: int,
        weight_version: Callable[[], int | None],
        trained_version: Callable[[], int | None] | None = None,
        reward_names: Mapping[str, Collection[str]] | None = None,
        min_scored: int = 1,
        max_failed_share: float = 0.1,
        sampled: SampledPrompts | None = None,
        greedy_baseline: bool = False,
    ) -> None:
        self._collector = collector
        self._prompts, self._sampled = prompts, sampled
        self._schedule = schedule
        self._samples, self._has_baseline, self._min_scored = group_size, greedy_baseline, min_scored
        self._group_size = group_size + greedy_baseline
        """Number of rows of a group, with its baseline."""
        self._failures = FailureLimit(max_failed_share)
        self._weights = RewardWeightCheck(reward_names or {})
        self._versions = DeliveredVersions(schedule.max_staleness, weight_version)
        self._weight_version = weight_version
        self._trained_version = trained_version or weight_version
        self._rows: dict[int, list[Trajectory]] = {}
        """By ordinal of the prompt: the rows of each group that is alive."""
        self._playing: dict[Future[None], list[int]] = {}
        """The ordinals of the groups that run together."""
        self._again: list[int] = []
        """Ordinals that a resumed run begins again."""
        self._restored: list[int] = []
        """Ordinals of restored groups that have not been counted and selected; their missing rows are to be sampled."""
        self._replaced: list[Trajectory] = []
        """Rows of the groups that were replaced since the last batch, because they had too few scored rows."""
        self._rejected: list[Trajectory] = []
        """Rows of the groups that the selection did not keep since the last batch."""
        self._selection: Selection | None = None
        self._step, self._groups = 0, 0
        """The current step, and its number of groups."""
        self._began_with: dict[int, int] = {}
        """By ordinal: the engine's weight version when the group began; only with an exact schedule."""
        self._ending_s: float | None = None
        """Seconds that `end_rollouts` took since the last batch; None if it was not called."""

    def take(self, step: int, groups: int, selection: Selection | None = None) -> Rollouts:
        """Complete groups of a step, none of which exceeds the staleness bound.

        Raises:
            RLCoreError: too many rows could not be scored, or the selection kept no group.
        """
        started = time.perf_counter()
        self._failures.expect(step, groups * self._group_size)
        self._selection = selection
        self._schedule.oversampling = 1.0 if selection is None else selection.oversampling
        batch = self._batch(step, groups)
        if not batch:
            assert selection is not None
            judged = len(self._rejected) // self._group_size
            raise RLCoreError(f"Step {step} sampled {judged} groups and could use none of them. {selection.advice}")
        trajectories = [row for ordinal in sorted(batch) for row in self._rows.pop(ordinal)]
        surplus = self._drop_surplus()
        counts = {} if selection is None else self._selection_counts(len(batch), groups, len(surplus) // self._group_size)
        others, self._rejected = self._rejected + surplus, []
        self._begin()
        return self._rollouts(step, trajectories, others, counts | {"rollout/wait_s": time.perf_counter() - started})

    def skip(self, step: int) -> None:
        self._batch(step, 0)
        self._drop_surplus()
        self._begin()

    def _batch(self, step: int, groups: int) -> list[int]:
        """Begin the step, and wait for the groups of its batch."""
        self._step, self._groups = step, groups
        self._schedule.refit(step, groups)
        self._versions.record(step)
        self._collector.generation.await_weights()
        self._begin()
        while (batch := self._schedule.batch(short=self._has_judged_enough)) is None:
            self._await_groups()
            if not self._has_judged_enough:
                self._begin()
        self._schedule.take(batch)
        return batch

    @property
    def _has_judged_enough(self) -> bool:
        judged = len(self._rejected) // self._group_size + len(self._schedule.ended)
        return self._selection is not None and judged >= self._selection.max_groups

    def _drop_surplus(self) -> list[Trajectory]:
        surplus = self._schedule.surplus
        for ordinal in surplus:
            self._schedule.drop(ordinal)
        return [row for ordinal in surplus for row in self._rows.pop(ordinal)]

    def _selection_counts(self, taken: int, groups: int, surplus: int) -> dict[str, float]:
        return {
            "dynamic_sampling/dropped_groups": float(len(self._rejected) // self._group_size),
            "dynamic_sampling/surplus_groups": float(surplus),
            "dynamic_sampling/missing_groups": float(groups - taken),
        }

    def _begin(self) -> None:
        """Begin as many groups as the schedule allows; with staleness 0, all groups of a batch together."""
        if self._schedule.max_staleness == 0 and self._playing:
            return
        restored, self._restored = self._restored, []
        self._play(restored)
        count = self._schedule.space
        ordinals, self._again = self._again[:count], self._again[count:]
        if self._sampled is None:
            self._start(ordinals + self._prompts.draw(count - len(ordinals)), self._prompts)
            return
        self._start(ordinals, self._sampled)
        while self._sampled.is_waiting(steps := self._schedule.steps_of_next(self._schedule.space)) and self._playing:
            self._await_groups()
        self._start(self._sampled.draw(steps, alive=[*self._rows, *self._again]), self._sampled)

    def _start(self, ordinals: list[int], prompts: BatchedDataLoader | SampledPrompts) -> None:
        if not ordinals:
            return
        rows = self._new_rows(prompts, ordinals)
        version = self._weight_version() if self._schedule.exact else None
        for position, ordinal in enumerate(ordinals):
            self._schedule.begin(ordinal)
            self._rows[ordinal] = rows[position * self._group_size : (position + 1) * self._group_size]
            if version is not None:
                self._began_with[ordinal] = version
        self._play(ordinals)

    def _new_rows(self, prompts: BatchedDataLoader | SampledPrompts, ordinals: list[int]) -> list[Trajectory]:
        records = prompts.rows_of(ordinals)
        return start_rollouts(records, self._samples, ordinals=ordinals, with_baseline=self._has_baseline)

    def _play(self, ordinals: list[int]) -> None:
        """Sample the rows of these groups that are not finished."""
        if not ordinals:
            return
        if not self._playing:
            self._collector.generation.prepare_for_generation()
        size = self._played_together(len(ordinals))
        for together in [ordinals[start : start + size] for start in range(0, len(ordinals), size)]:
            played = [row for ordinal in together for row in self._rows[ordinal] if not row.finished]
            self._playing[self._collector.loop.start(self._collector.play(played, stream=SampleStream.TRAINING))] = together

    def _played_together(self, count: int) -> int:
        """Number of groups whose rows are sampled together if the engine samples complete batches."""
        if self._schedule.exact:
            demand: list[int] = self._schedule.limits()["demand"]
            return max(1, *demand)  # the batches of a synchronous run
        return count if self._schedule.max_staleness == 0 else 1

    def end_rollouts(self) -> None:
        started = time.perf_counter()
        if self._schedule.exact:  # a group that is replaced also begins with these weights
            while self._playing:
                self._await_groups()
                self._begin()
        else:
            self._wait_for(all)
        self._ending_s = (self._ending_s or 0.0) + time.perf_counter() - started

    def _wait_for(self, number: Callable[[Iterable[bool]], bool]) -> None:
        """Wait until any or all groups in progress have ended."""
        self._collector.loop.wait(
            lambda: number(future.done() for future in self._playing), meanwhile=self._collector.generation.await_weights
        )

    def _await_groups(self) -> None:
        """Wait until groups have ended, and sort out those with too few scored rows."""
        step, groups = self._step, self._groups
        self._wait_for(any)
        is_first = self._schedule.max_staleness == 0 and not (self._replaced or self._rejected or self._schedule.ended)
        ended = [future for future in self._playing if future.done()]
        ordinals = [ordinal for future in ended for ordinal in self._playing.pop(future)]
        for future in ended:
            future.result()
        rows = [row for ordinal in ordinals for row in self._rows[ordinal]]
        self._failures.count(step, rows)
        if is_first and len(ordinals) > 1:
            refuse_total_failure(rows)
        for ordinal in ordinals:
            samples = compared_samples(self._rows[ordinal])
            if self._sampled is not None:
                self._sampled.record(ordinal, [row.reward for row in samples if row.scored and row.reward_parts])
            without_baseline = any(is_baseline(row) and not row.scored for row in self._rows[ordinal])
            if without_baseline or sum(row.scored for row in samples) < self._min_scored:
                self._schedule.drop(ordinal)
                self._replaced += self._rows.pop(ordinal)
            elif self._selection is None or self._selection.keep(samples):
                self._schedule.end(ordinal)
            else:
                self._schedule.drop(ordinal)
                self._rejected += self._rows.pop(ordinal)
                self._failures.expect(step, self._group_size)
        if len(self._replaced) > _MAX_REPLACED * max(groups, 1) * self._group_size:
            raise RLCoreError(
                f"Step {step}: {len(self._replaced)} rollouts were replaced, and too few could be scored for {groups} groups "
                f"with at least {self._min_scored} scored rows (rollout.min_scored). Check which rows the environment or the "
                "reward functions leave unscored."
            )

    def _rollouts(
        self, step: int, trajectories: list[Trajectory], others: list[Trajectory], counts: dict[str, float]
    ) -> Rollouts:
        """The rollouts of a batch; the statistics also cover the groups that were sampled but not selected (`others`)."""
        for i, row in enumerate(trajectories):
            row.group_id = i // self._group_size
        replaced, self._replaced = self._replaced, []
        played = trajectories + others
        trajectories, sampled = compared_samples(trajectories), compared_samples(played)
        self._weights.check(sampled)
        batch = to_batch(trajectories)
        metrics = summarize(sampled) | environment_times(played + replaced)
        if self._has_baseline and (equal := equal_groups_frac(played)) is not None:
            metrics["reward/equal_groups_frac"] = equal
        metrics |= environment_metrics(sampled, self._collector.environments)
        metrics |= failure_metrics(played + replaced, replaced_groups=len(replaced) // self._group_size)
        metrics |= self._versions.staleness(batch, step) | counts
        if self._sampled is not None:
            metrics |= self._sampled.metrics()
        if (version := self._trained_version()) is not None:
            metrics |= staleness_metrics(batch, version)
        if self._schedule.exact:
            refuse_other_versions(batch, [self._began_with.get(row.ordinal, -1) for row in trajectories])
            self._began_with = {ordinal: began for ordinal, began in self._began_with.items() if ordinal in self._rows}
        if self._ending_s is not None:
            metrics["rollout/ending_s"], self._ending_s = self._ending_s, None
        metrics |= {
            "rollout/in_flight": float(len(self._schedule.in_progress) * self._group_size),
            "rollout/ready": float(len(self._schedule.ended) * self._group_size),
        }
        return Rollouts(batch=batch, metrics=metrics, trajectories=trajectories)

    def state_dict(self) -> dict[str, Any]:
        """The position; of groups in no batch yet, rows that are not in `save_files` begin again, with newer weights."""
        if self._schedule.exact:
            self.end_rollouts()
        sampled = {} if self._sampled is None else {"sampled": self._sampled.state_dict()}
        return sampled | {
            "prompts": self._prompts.state_dict(),
            "again": sorted([*self._rows, *self._again]),
            "next_step": self._schedule.next_step,
            "versions": self._versions.state_dict(),
            "failures": self._failures.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state:
            raise CheckpointError("The checkpoint is of a run that replays another one. Resume it with --replay RUN.")
        self._prompts.load_state_dict(state["prompts"])
        if self._sampled is not None:
            self._sampled.load_state_dict(state.get("sampled"))
        elif "sampled" in state:
            raise CheckpointError(
                f"The prompts of the checkpoint were drawn by the prompt sampler {state['sampled']['name']}. Set "
                "data.sampler, or start a new run from its weights."
            )
        self._again = list(state.get("again", state.get("put_back", ())))
        self._schedule.next_step = state.get("next_step", 1)
        self._versions.load_state_dict(state.get("versions", ()))
        if "failures" in state:
            self._failures.load_state_dict(state["failures"])

    def save_files(self, folder: Path) -> None:
        """Write the finished rows of the groups that are in no batch yet, first of those that have ended, in that order."""
        ended = dict.fromkeys(self._schedule.ended)
        finished = {n: [row for row in self._rows[n] if row.finished] for n in [*ended, *self._rows]}
        groups = [
            SavedGroup(ordinal=n, began=self._schedule.began(n), accepted=n in ended, rows=rows)
            for n, rows in finished.items()
            if rows
        ]
        save_groups(folder, groups, self._limits)

    def load_files(self, folder: Path, *, config_changed: bool = False) -> None:
        """Continue with the finished rows; if the config has changed, all rows of an unfinished group begin again."""
        groups = load_groups(folder, self._limits)
        whole = [group for group in groups if len(group.rows) == self._group_size]
        if config_changed and len(whole) < len(groups):
            _log.info("unfinished groups of the checkpoint are sampled again, because the config has changed")
        for group in whole if config_changed else groups:
            self._again.remove(group.ordinal)
            self._rows[group.ordinal] = self._with_missing(group)
            self._schedule.begin(group.ordinal, at=group.began)
            if group.accepted:
                self._schedule.end(group.ordinal)
            else:
                self._restored.append(group.ordinal)

    def _with_missing(self, group: SavedGroup) -> list[Trajectory]:
        """The rows of a group; those that are not saved have only their prompts."""
        if len(group.rows) == self._group_size:
            return group.rows
        prompts = self._prompts if self._sampled is None else self._sampled
        rows = self._new_rows(prompts, [group.ordinal])
        for row in group.rows:
            rows[row.sample] = row
        return rows

    @property
    def _limits(self) -> dict[str, Any]:
        baseline = {"greedy_baseline": True} if self._has_baseline else {}
        return {**self._schedule.limits(), "group_size": self._group_size, **baseline}

    def close(self) -> None:
        self._collector.loop.close()


class RewardWeightCheck:
    """Checks each task once, with its first scored rollouts.

    Args:
        reward_names: rewards that a task may return later, by task.
    """

    def __init__(self, reward_names: Mapping[str, Collection[str]]) -> None:
        self._reward_names = reward_names
        self._checked: set[str] = set()

    def check(self, trajectories: Sequence[Trajectory]) -> None:
        """Check the tasks that were not checked before.

        Args:
            trajectories: finished rollouts of one draw.

        Raises:
            ConfigError: a weight has the name of no reward.
        """
        scored = [row for row in trajectories if row.scored and row.task_name not in self._checked]
        for task in dict.fromkeys(row.task_name for row in scored):
            rows = [row for row in scored if row.task_name == task]
            names = sorted({name for row in rows for name in row.reward_parts} | set(self._reward_names.get(task, ())))
            unknown = sorted(set(rows[0].reward_weights) - set(names))
            if unknown:
                error = ConfigError(
                    f"`reward_weights` of the task {task!r} has the name {unknown[0]!r}, but the environment returned the "
                    f"rewards {', '.join(names) or 'none'}.{did_you_mean(unknown[0], names)} An environment must return every "
                    "weighted reward in the first step, with 0.0 for rows without it."
                )
                error.key = f"env.{task}.reward_weights"
                raise error
            self._checked.add(task)
