"""Predicts the time of steps with `rollout.max_staleness`, from the times of rows, training and refits."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from rl_train.rollouts.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """One step of a simulated run."""

    end: float
    """In seconds from the start of the run."""
    groups: list[int]
    """The ordinals that it trains."""


def simulate(
    row_seconds: Callable[[int, int], float],
    *,
    steps: int,
    slots: int,
    train_s: float,
    refit_s: float = 0.0,
    max_staleness: int = 0,
    ahead: int = 0,
    prompts: int = 8,
    group_size: int = 4,
) -> list[SimulatedStep]:
    """The steps of a run without any other overhead.

    Args:
        row_seconds: the time of a row on its slot, by ordinal of the prompt and sample.
        steps: number of steps.
        slots: number of rows that the engine runs at the same time; the others wait in the order in which they began.
        train_s: duration of training.
        refit_s: duration of a refit; rows continue meanwhile.
        max_staleness: k.
        ahead: batches begun beyond the one in training.
        prompts: groups of a step.
        group_size: rows of a group.
    """
    schedule = Schedule(max_staleness=max_staleness, ahead=ahead, demand=lambda step: prompts if step <= steps else 0)
    now, ordinals = 0.0, itertools.count()
    taken: list[SimulatedStep] = []
    free = [0.0] * slots
    running: list[tuple[float, int]] = []

    def begin() -> None:
        for _ in range(schedule.space):
            ordinal = next(ordinals)
            schedule.begin(ordinal)
            group = []
            for sample in range(group_size):
                end = max(free[0], now) + row_seconds(ordinal, sample)
                heapq.heapreplace(free, end)
                group.append(end)
            heapq.heappush(running, (max(group), ordinal))

    for step in range(1, steps + 1):
        now += refit_s
        schedule.refit(step, prompts)
        begin()
        while True:
            while running and running[0][0] <= now:
                schedule.end(heapq.heappop(running)[1])
            batch = schedule.batch()
            if batch is not None:
                break
            now = running[0][0]
        schedule.take(batch)
        begin()
        now += train_s
        taken.append(SimulatedStep(end=now, groups=batch))
    return taken
