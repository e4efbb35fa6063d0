"""Our prompt samplers: a band of pass rates, a mixture of tasks, and stages of a field or of the length of prompts.

All are deterministic: where a share of the draws is meant, the shares of all draws so far are kept up instead of drawing random
numbers, so the order does not depend on how many prompts are drawn at once.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from statistics import fmean, pstdev
from typing import Any

from rl_core.errors import ConfigError, DataError, with_key
from rl_core.plugins.component import Component
from rl_train.config.data_sections import SamplerConfig
from rl_train.data.dataloader import BatchedDataLoader
from rl_train.data.mixing import row_order
from rl_train.data.prompt_sampler import PromptResult, PromptRows, PromptSampler, SampledPrompts
from rl_train.errors import reporting_errors


class PassRateBand(PromptSampler):
    """Prefers prompts whose estimated pass rate lies within a band, and tries others in between.

    The estimate of a row is the mean reward of its last group, averaged with the estimate before:
    p <- (1 - new_weight) p + new_weight m. A share of the draws explores: rows that were never drawn, in the order of the data,
    then the row outside the band that was tried least recently. Other draws are for the row in the band that was tried least
    recently, if `rest` times as many prompts as there are rows were drawn since; if there is none, they explore as well.

    The share is `exploration`. While there are rows that were never drawn, it is at least the fraction of rated rows that are
    in the band: a new row is then as likely to be in it, and teaches more than one that was trained on before.

    Args:
        rows: The training prompts.
        low: Lower end of the band.
        high: Upper end of the band, which includes both.
        exploration: Smallest share of the draws that explore.
        rest: Number of draws between two of one row from the band, as a multiple of the number of rows.
        new_weight: Weight of the newest group.
    """

    def __init__(
        self, rows: PromptRows, *, low: float, high: float, exploration: float, rest: float, new_weight: float
    ) -> None:
        super().__init__(rows)
        self._low, self._high, self._exploration, self._new_weight = low, high, exploration, new_weight
        self._rest = rest * len(rows)
        self._estimates: dict[int, float] = {}
        """By row, for rows that have a reward."""
        self._last: dict[int, int] = {}
        """Number of the last draw of each row that was drawn."""
        self._inside: dict[int, None] = {}
        self._outside: dict[int, None] = {}
        """Rows that were drawn and are not in flight, the least recently tried first."""
        self._in_flight: dict[int, int] = {}
        """Number of draws whose results were not seen yet."""
        self._sides = {-1: 0, 0: 0, 1: 0}
        """Number of rows with an estimate below, in and above the band."""
        self._position = 0
        """In the endless order of the data, for rows that were never drawn."""
        self._credit = 0.0
        """Draws that exploration is due."""
        self._count, self._reported, self._explored = 0, 0, 0
        """Number of draws; of those before the last metrics; of those that explored since then."""

    def choose(self, count: int, *, step: int, excluded: Collection[int]) -> list[int]:
        chosen: list[int] = []
        taken = set(excluded)
        for _ in range(count):
            chosen.append(self._next(taken))
            taken.add(chosen[-1])
        return chosen

    def _next(self, taken: set[int]) -> int:
        self._credit += self._share()
        explores = self._credit >= 1.0
        self._credit -= explores
        unseen, outside = self._unseen(taken), _free(self._outside, taken)
        rested = (row for row in itertools.islice(_free(self._inside, taken), 1) if self._count - self._last[row] >= self._rest)
        pools = (unseen, outside, rested) if explores else (rested, unseen, outside)
        row: int = next(itertools.chain(*pools, _free(self._inside, taken), _free(self._in_flight, taken)))
        self._explored += row not in self._inside
        self._inside.pop(row, None)
        self._outside.pop(row, None)
        self._in_flight[row] = self._in_flight.pop(row, 0) + 1  # to the end
        self._last[row] = self._count
        self._count += 1
        return row

    def _share(self) -> float:
        """The share of the draws that explore."""
        if len(self._last) == len(self.rows) or not self._estimates:
            return self._exploration
        return max(self._exploration, self._sides[0] / len(self._estimates))

    def _unseen(self, taken: Collection[int]) -> Iterator[int]:
        """The next row that was never drawn, if there is one."""
        while len(self._last) < len(self.rows):
            epoch, position = divmod(self._position, len(self.rows))
            row = self.rows.order(epoch)[position]
            if row not in self._last and row not in taken:
                yield row
                return
            self._position += 1

    def observe(self, results: Sequence[PromptResult]) -> None:
        for result in results:
            row, before = result.row, self._estimates.get(result.row)
            if result.rewards:
                mean = fmean(result.rewards)
                self._estimates[row] = mean if before is None else before + self._new_weight * (mean - before)
                self._sides[self._side(self._estimates[row])] += 1
                if before is not None:
                    self._sides[self._side(before)] -= 1
            self._in_flight[row] -= 1
            if not self._in_flight[row]:
                del self._in_flight[row]
                is_inside = row in self._estimates and self._side(self._estimates[row]) == 0
                (self._inside if is_inside else self._outside)[row] = None

    def _side(self, estimate: float) -> int:
        """-1 below the band, 0 within it, 1 above it."""
        return int(estimate > self._high) - int(estimate < self._low)

    def metrics(self) -> dict[str, float]:
        metrics = {"tried_frac": len(self._estimates) / len(self.rows)}
        if self._estimates:
            names = {"below_band_frac": -1, "in_band_frac": 0, "above_band_frac": 1}
            metrics |= {name: self._sides[side] / len(self._estimates) for name, side in names.items()}
        if self._count > self._reported:
            metrics["explored_frac"] = self._explored / (self._count - self._reported)
            self._reported, self._explored = self._count, 0
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {
            "estimates": [[row, estimate] for row, estimate in self._estimates.items()],
            "last": [[row, number] for row, number in self._last.items()],
            "inside": list(self._inside),
            "outside": list(self._outside),
            "in_flight": [[row, count] for row, count in self._in_flight.items()],
            "position": self._position,
            "credit": self._credit,
            "counts": [self._count, self._reported, self._explored],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._estimates, self._last = dict(state["estimates"]), dict(state["last"])
        self._inside, self._outside = dict.fromkeys(state["inside"]), dict.fromkeys(state["outside"])
        self._in_flight = dict(state["in_flight"])
        self._position, self._credit = state["position"], state["credit"]
        self._count, self._reported, self._explored = state["counts"]
        for estimate in self._estimates.values():
            self._sides[self._side(estimate)] += 1


def _free(rows: Collection[int], taken: Collection[int]) -> Iterator[int]:
    return (row for row in rows if row not in taken)


class _Passes:
    """Rows of a subset, pass after pass, each in a new order; rows that are excluded come as soon as they are not."""

    def __init__(self, rows: Sequence[int], *, seed: int, shuffle: bool) -> None:
        self._rows, self._seed, self._shuffle = rows, seed, shuffle
        self.position = 0
        self.postponed: list[int] = []
        self._order: tuple[int, Sequence[int]] = (-1, ())

    def next(self, excluded: Collection[int]) -> int | None:
        """The next row; None if all are excluded."""
        if len(excluded) >= len(self._rows) and set(self._rows) <= set(excluded):
            return None
        row = next((row for row in self.postponed if row not in excluded), None)
        if row is not None:
            self.postponed.remove(row)
            return row
        while (row := self._at(self.position)) in excluded:
            self.postponed.append(row)
            self.position += 1
        self.position += 1
        return row

    def _at(self, position: int) -> int:
        number, index = divmod(position, len(self._rows))
        if self._order[0] != number:
            size = len(self._rows)
            self._order = number, row_order(size, seed=self._seed, epoch=number).tolist() if self._shuffle else range(size)
        return self._rows[self._order[1][index]]


class TaskMix(PromptSampler):
    """Mixes tasks by the spread of their rewards.

    The spread s of a task is the standard deviation of the rewards within a group, averaged over its groups:
    s <- (1 - new_weight) s + new_weight sd. A task without a reward yet has the largest spread of the others. With T tasks, the
    share of task t is min_share + (1 - T min_share) s_t^(1/temperature) / sum_u s_u^(1/temperature), or 1/T if all spreads are
    0. Each draw is of the task that is furthest behind its share; a task's rows are drawn pass after pass.

    Args:
        rows: The training prompts.
        temperature: 1: shares are proportional to spreads; higher: more equal; lower: more of the largest.
        min_share: Smallest share of a task.
        new_weight: Weight of the newest group.

    Raises:
        ConfigError: There is one task, or there are too many for the smallest share.
    """

    def __init__(self, rows: PromptRows, *, temperature: float, min_share: float, new_weight: float) -> None:
        super().__init__(rows)
        self._temperature, self._min_share, self._new_weight = temperature, min_share, new_weight
        of_task: dict[str, list[int]] = {}
        for row, task in enumerate(rows.task_names):
            of_task.setdefault(task, []).append(row)
        if len(of_task) == 1:
            raise ConfigError(
                f"task_mix mixes tasks, but all rows have the task {next(iter(of_task))!r}. Set `task_name` in "
                "the sections of the datasets or in the rows, or remove the sampler."
            )
        if min_share * len(of_task) > 1.0:
            raise ConfigError(
                f"is {min_share}, but there are {len(of_task)} tasks: at most {1 / len(of_task):.3g}.",
                key="data.sampler.min_share",
            )
        self._passes = {
            task: _Passes(of_task[task], seed=rows.seed + number, shuffle=rows.shuffle)
            for number, task in enumerate(sorted(of_task))
        }
        self._spreads: dict[str, float] = {}
        self._behind = dict.fromkeys(self._passes, 0.0)
        """Draws that each task is due."""

    def shares(self) -> dict[str, float]:
        """The share of each task in the next draws."""
        largest = max(self._spreads.values(), default=1.0)
        powers = {task: self._spreads.get(task, largest) for task in self._passes}
        top = max(powers.values())
        powers = {task: (each / top) ** (1 / self._temperature) if top else 1.0 for task, each in powers.items()}
        rest, total = 1.0 - self._min_share * len(powers), sum(powers.values())
        return {task: self._min_share + rest * each / total for task, each in powers.items()}

    def choose(self, count: int, *, step: int, excluded: Collection[int]) -> list[int]:
        shares, taken, chosen = self.shares(), set(excluded), list[int]()
        while len(chosen) < count:
            for task, share in shares.items():
                self._behind[task] += share
            for task in sorted(self._behind, key=lambda task: -self._behind[task]):
                row = self._passes[task].next(taken)
                if row is not None:
                    self._behind[task] -= 1.0
                    chosen.append(row)
                    taken.add(row)
                    break
        return chosen

    def observe(self, results: Sequence[PromptResult]) -> None:
        for result in results:
            if len(result.rewards) > 1:
                task, spread = self.rows.task_names[result.row], pstdev(result.rewards)
                before = self._spreads.get(task, spread)
                self._spreads[task] = before + self._new_weight * (spread - before)

    def metrics(self) -> dict[str, float]:
        shares = {f"share/{task}": share for task, share in self.shares().items()}
        return shares | {f"spread/{task}": spread for task, spread in self._spreads.items()}

    def state_dict(self) -> dict[str, Any]:
        passes = {task: [each.position, list(each.postponed)] for task, each in self._passes.items()}
        return {"spreads": self._spreads, "behind": self._behind, "passes": passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._spreads, self._behind = dict(state["spreads"]), dict(state["behind"])
        for task, (position, postponed) in state["passes"].items():
            self._passes[task].position, self._passes[task].postponed = position, list(postponed)


class Stages(PromptSampler):
    """Begins with the rows of the smallest values, and adds others stage by stage.

    Stage j, from 1, has the rows whose value is at most bounds[j - 1]; the last stage has all rows. A stage's rows are drawn
    pass after pass. If a step draws more rows than a stage has, the rest is of the next stages.

    Args:
        rows: The training prompts.
        key: Field of the row's metadata; None for the number of characters of the prompt.
        bounds: Largest value of each stage but the last.
        at_steps: First step of each stage but the first; empty to use rewards.
        at_reward: Mean reward of the last `window` groups of a stage that ends it; None to use steps.
        window: Number of groups.

    Raises:
        DataError: A row has no such value, or a stage has no rows that the one before did not have.
    """

    def __init__(
        self,
        rows: PromptRows,
        *,
        key: str | None,
        bounds: Sequence[float],
        at_steps: Sequence[int],
        at_reward: float | None,
        window: int,
    ) -> None:
        super().__init__(rows)
        self._at_steps, self._at_reward = at_steps, at_reward
        values = rows.values(key)
        pools = [[row for row, value in enumerate(values) if value <= bound] for bound in bounds] + [list(range(len(values)))]
        sizes = [0, *map(len, pools)]
        empty = next((number for number in range(1, len(sizes)) if sizes[number] == sizes[number - 1]), None)
        if empty is not None:
            raise DataError(
                f"stage {empty} of data.sampler has no rows that the stage before does not have: the values of "
                f"{key or 'the length of prompts'} are from {min(values):g} to {max(values):g}, and the bounds are "
                f"{', '.join(f'{bound:g}' for bound in bounds)}"
            )
        self._passes = [_Passes(pool, seed=rows.seed + n, shuffle=rows.shuffle) for n, pool in enumerate(pools)]
        self._stage, self._since = 0, 0
        """The current stage, from 0, and the step of its first draw."""
        self._rewards: deque[float] = deque(maxlen=window)

    def choose(self, count: int, *, step: int, excluded: Collection[int]) -> list[int]:
        if self._at_reward is None:
            self._stage = sum(step >= first for first in self._at_steps)
        elif not self._since:
            self._since = step
        taken, chosen = set(excluded), list[int]()
        while len(chosen) < count:
            found = (passes.next(taken) for passes in self._passes[self._stage :])
            row = next(row for row in found if row is not None)
            chosen.append(row)
            taken.add(row)
        return chosen

    def observe(self, results: Sequence[PromptResult]) -> None:
        if self._at_reward is None:
            return
        for result in results:
            if not result.rewards or not self._since or result.step < self._since:
                continue
            self._rewards.append(fmean(result.rewards))
            is_reached = len(self._rewards) == self._rewards.maxlen and fmean(self._rewards) >= self._at_reward
            if is_reached and self._stage < len(self._passes) - 1:
                self._stage, self._since = self._stage + 1, 0
                self._rewards.clear()

    def metrics(self) -> dict[str, float]:
        reward = {"stage_reward": fmean(self._rewards)} if self._rewards else {}
        return {"stage": float(self._stage + 1)} | reward

    def state_dict(self) -> dict[str, Any]:
        passes = [[each.position, list(each.postponed)] for each in self._passes]
        return {"stage": self._stage, "since": self._since, "rewards": list(self._rewards), "passes": passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stage, self._since = state["stage"], state["since"]
        self._rewards.extend(state["rewards"])
        for passes, (position, postponed) in zip(self._passes, state["passes"], strict=True):
            passes.position, passes.postponed = position, list(postponed)


def make_sampled_prompts(config: SamplerConfig, loader: BatchedDataLoader, *, max_staleness: int) -> SampledPrompts:
    """The prompts of a loader in the order of the sampler of `data.sampler`.

    Raises:
        ComponentImportError: Its path cannot be imported.
        WrongKindError: The path is not a `PromptSampler`.
        ConfigError: It cannot be created.
        DataError: The data does not have what it needs.
    """
    with with_key("data.sampler.name"):
        sampler = _make_sampler(config, PromptRows(loader))
        delay = max_staleness if config.delay is None else config.delay
        return SampledPrompts(loader, sampler, name=config.name, delay=delay)


def _make_sampler(config: SamplerConfig, rows: PromptRows) -> PromptSampler:
    match config.name:
        case "pass_rate_band":
            return PassRateBand(
                rows,
                low=config.low,
                high=config.high,
                exploration=config.exploration,
                rest=config.rest,
                new_weight=0.5 if config.new_weight is None else config.new_weight,
            )
        case "task_mix":
            return TaskMix(
                rows,
                temperature=config.task_temperature,
                min_share=config.min_share,
                new_weight=0.05 if config.new_weight is None else config.new_weight,
            )
        case "stages":
            return Stages(
                rows,
                key=config.key,
                bounds=config.bounds,
                at_steps=config.at_steps,
                at_reward=config.at_reward,
                window=config.window,
            )
        case path:
            sampler_class = Component.from_path(path).load(expect=PromptSampler)
            with reporting_errors(f"The prompt sampler {path}(...)", sampler_class):
                sampler: PromptSampler = sampler_class(rows, **config.kwargs)
            return sampler
