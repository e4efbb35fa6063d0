"""Prompt samplers (`data.sampler`): what they see, what they return, and the order of draws that makes them repeatable.

A sampler replaces the shuffled epochs of `BatchedDataLoader` for the prompts of rollouts. Every prompt is drawn for a step: the
step that would train it if groups were trained in the order in which they begin. Before the draws for step s, the sampler sees
the rewards of the prompts of all steps up to s - 1 - delay, in the order in which they were drawn. The delay is at least
`rollout.max_staleness`, so nearly always these have been trained; otherwise, as after a resume that began them again, the
draws wait for them. So the draws depend neither on which rollouts end first, nor on the number of engines, nor on resumes. If
groups are replaced while others are in progress, because they failed or by dynamic sampling, the number of prompts that an
asynchronous run draws for a step depends on what ends first.
"""

from __future__ import annotations

import itertools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NoReturn

from rl_core.errors import ConfigError, DataError, format_value, with_key
from rl_train.data.arrow_rows import ConcatDataset
from rl_train.data.conversations import without_answer
from rl_train.data.dataloader import BatchedDataLoader
from rl_train.data.holdout import row_location
from rl_train.data.image_sources import texts_of
from rl_train.data.processors import TokenizedRows
from rl_train.errors import reporting_errors

METRICS = "data/sampler/"
"""Prefix of the metrics of a sampler."""


class PromptRows:
    """The training prompts that a sampler chooses from, by row number, from 0. The rows of `data.mix` follow one another.

    Args:
        loader: The loader of the prompts; its position does not change.
    """

    def __init__(self, loader: BatchedDataLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader.dataset)

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self._loader.seed

    @property
    def shuffle(self) -> bool:
        """`data.shuffle`."""
        return self._loader.shuffle

    def order(self, epoch: int) -> Sequence[int]:
        """The row numbers of an epoch, from 0, as without a sampler: shuffled, and mixed by the weights of `data.mix`."""
        return self._loader.order(epoch)

    @cached_property
    def task_names(self) -> list[str]:
        """The task of each row."""
        return [str(self._record(row).get("task_name") or "default") for row in range(len(self))]

    def values(self, key: str | None) -> list[float]:
        """A number of each row.

        Args:
            key: A field of the row's metadata (`env_keys` of the dataset); None for the number of characters of the prompt,
                without images and without the answer of the data.

        Raises:
            DataError: A row has no such field or no messages, or the value is not a number.
        """
        return [self._value(row, key) for row in range(len(self))]

    def _value(self, row: int, key: str | None) -> float:
        record = self._record(row)
        if key is None:
            if "messages" not in record:
                where = row_location(self._loader.dataset, row)
                raise DataError(f"{where} has no `messages`, so its prompt has no length. Set `key` to a field of the metadata")
            return float(sum(len(text) for message in without_answer(record["messages"]) for text in texts_of(message)))
        metadata = record.get("extra_env_info") or {}
        value = metadata.get(key) if isinstance(metadata, Mapping) else None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            known = ", ".join(map(str, metadata)) or "no fields"
            found = f"is {format_value(value)}, not a number" if key in metadata else f"is not in its metadata ({known})"
            where = row_location(self._loader.dataset, row)
            raise DataError(f"{where}: {key!r} {found}. Choose a field with numbers that `env_keys` of the dataset lists")
        return float(value)

    def _record(self, row: int) -> Mapping[str, Any]:
        dataset, index = self._loader.dataset, row
        if isinstance(dataset, ConcatDataset):
            number, index = dataset.locate(row)
            dataset = dataset.parts[number]
        try:
            record: Mapping[str, Any] = dataset.record(index) if isinstance(dataset, TokenizedRows) else dataset[index]
        except DataError as error:
            raise DataError(f"{row_location(dataset, index)}: {error}") from error
        return record


@dataclass(frozen=True, kw_only=True)
class PromptResult:
    """The rewards of the rollouts of one drawn prompt."""

    row: int
    """Its row number."""
    step: int
    """The step for which it was drawn."""
    rewards: tuple[float, ...]
    """The weighted sum of the rewards of each rollout that was scored, before reward shaping. Empty if none was."""


class PromptSampler(ABC):
    """Chooses the prompts of rollouts (`data.sampler`), and sees their rewards.

    What it chooses must be a function of its arguments, of `rows` and of what it has seen: draw random numbers with
    `rows.seed`, and keep all state in `state_dict`.

    Args:
        rows: The training prompts.
    """

    uses_rewards: ClassVar[bool] = True
    """Whether it needs rewards. If so, a run that scores nothing is refused."""

    def __init__(self, rows: PromptRows) -> None:
        self.rows = rows

    @abstractmethod
    def choose(self, count: int, *, step: int, excluded: Collection[int]) -> Sequence[int]:
        """The numbers of the next `count` rows, all different and none of them excluded.

        Args:
            count: At least 1, and at most the number of rows that are not excluded.
            step: The step for which the prompts are drawn.
            excluded: The rows that were drawn for this step already. No row is drawn twice for a step unless all were drawn.
        """

    def observe(self, results: Sequence[PromptResult]) -> None:
        """The next results, in the order of draws: after all prompts of a step were drawn and have ended."""
        return None

    def metrics(self) -> dict[str, float]:
        """Finite numbers by name, which each step records as `data/sampler/<name>`."""
        return {}

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Its state, as JSON: keys are strings, and there are no tuples."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""


@dataclass(kw_only=True)
class _Draw:
    """A drawn prompt, until the sampler has seen its result and its group is in a batch."""

    row: int
    step: int
    rewards: list[float] | None = None
    """None until its group has ended."""
    is_seen: bool = False


class SampledPrompts:
    """The endless order of prompts that a sampler chooses; ordinals count draws, as in `BatchedDataLoader`.

    Args:
        loader: The loader of the prompts, which determines the first ordinal.
        sampler: Chooses rows.
        name: Its name in errors.
        delay: Number of steps before the previous one whose rewards are not seen yet.
    """

    def __init__(self, loader: BatchedDataLoader, sampler: PromptSampler, *, name: str, delay: int) -> None:
        self._loader, self._sampler, self._name, self._delay = loader, sampler, name, delay
        self._next = loader.next_ordinal
        self._draws: dict[int, _Draw] = {}
        """By ordinal, in this order."""
        self.state_dict()  # tried before the run starts

    def draw(self, steps: Sequence[int], alive: Collection[int]) -> list[int]:
        """The ordinals of the next prompts.

        Args:
            steps: The step of each prompt.
            alive: Ordinals of the groups that are in no batch yet.
        """
        self._draws = {n: each for n, each in self._draws.items() if n in alive or not each.is_seen}
        first = self._next
        for step, group in itertools.groupby(steps):
            self._show(step - 1 - self._delay)
            missing = len(list(group))
            while missing:
                drawn = [each.row for each in self._draws.values() if each.step == step]
                excluded = set(drawn[len(drawn) // len(self._loader.dataset) * len(self._loader.dataset) :])
                rows = self._choose(min(missing, len(self._loader.dataset) - len(excluded)), step, excluded)
                for row in rows:
                    self._draws[self._next] = _Draw(row=row, step=step)
                    self._next += 1
                missing -= len(rows)
        return list(range(first, self._next))

    def is_waiting(self, steps: Sequence[int]) -> bool:
        """Whether groups are in progress whose rewards the sampler must see before its draws for these steps."""
        last = max(steps, default=0) - 1 - self._delay
        return any(each.rewards is None and each.step <= last for each in self._draws.values())

    def _show(self, last: int) -> None:
        """Show the sampler the results of the steps up to `last`, up to the first prompt that has not ended."""
        waiting = (each for each in self._draws.values() if not each.is_seen)
        ended = list(itertools.takewhile(lambda each: each.step <= last and each.rewards is not None, waiting))
        for each in ended:
            each.is_seen = True
        if ended:
            results = [PromptResult(row=each.row, step=each.step, rewards=tuple(each.rewards or ())) for each in ended]
            with self._reporting("observe"):
                self._sampler.observe(results)

    def _choose(self, count: int, step: int, excluded: set[int]) -> list[int]:
        with self._reporting("choose"):
            rows = list(self._sampler.choose(count, step=step, excluded=frozenset(excluded)))
        most, drawn = len(self._loader.dataset), set(excluded)
        for row in rows:
            if isinstance(row, bool) or not isinstance(row, int) or not 0 <= row < most:
                self._refuse(f"`choose` returned {format_value(row)}, but the rows are 0 to {most - 1} (step {step})")
            if row in drawn:
                self._refuse(f"`choose` returned row {row} twice for step {step}, before all {most} rows were drawn for it")
            drawn.add(row)
        if len(rows) != count:
            self._refuse(f"`choose` returned {len(rows)} rows instead of {count} (step {step})")
        return rows

    def _refuse(self, problem: str) -> NoReturn:
        raise ConfigError(f"The prompt sampler {self._name}: {problem}.", key="data.sampler.name")

    @contextmanager
    def _reporting(self, method: str) -> Iterator[None]:
        with with_key("data.sampler.name"), reporting_errors(f"The prompt sampler {self._name}: `{method}`", self._sampler):
            yield

    def rows_of(self, ordinals: Sequence[int]) -> Any:
        """The prompts with these ordinals; those of draws without the sampler are of the loader's order."""
        dataset = self._loader.dataset
        return [dataset[self._draws[n].row] if n in self._draws else self._loader.rows_of([n])[0] for n in ordinals]

    def record(self, ordinal: int, rewards: list[float]) -> None:
        """The rewards of a group that has ended; only the first of a group counts that a resumed run samples again."""
        draw = self._draws.get(ordinal)
        if draw is not None and draw.rewards is None:
            draw.rewards = rewards

    def metrics(self) -> dict[str, float]:
        """The sampler's metrics, and the number of drawn prompts divided by the number of rows."""
        with self._reporting("metrics"):
            metrics = {name: float(value) for name, value in self._sampler.metrics().items()}
        for name, value in metrics.items():
            if not math.isfinite(value):
                self._refuse(f"its metric {name!r} is {value}, not a finite number")
        metrics = {"epochs": self._next / len(self._loader.dataset)} | metrics
        return {f"{METRICS}{name}": value for name, value in metrics.items()}

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state, and the draws that it has not seen yet or that are in no batch yet.

        Raises:
            ConfigError: The state of the sampler is not JSON.
        """
        with self._reporting("state_dict"):
            state = self._sampler.state_dict()
            if json.loads(json.dumps(state)) != state:
                raise TypeError("the state changes when it is written as JSON: use strings as keys, and lists, not tuples")
        draws = [[n, each.row, each.step, each.rewards, each.is_seen] for n, each in self._draws.items()]
        return {"name": self._name, "next": self._next, "draws": draws, "state": state}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from `state_dict`, after the state of the loader was loaded; begin after its draws without a state.

        Raises:
            DataError: The state is of another sampler.
        """
        if state is None:
            self._next = self._loader.next_ordinal
            return
        if state["name"] != self._name:
            raise DataError(
                f"the state is of the prompt sampler {state['name']}, but data.sampler is {self._name}. Use the same sampler, "
                "or start a new run (`--resume never`)"
            )
        self._next = state["next"]
        self._draws = {
            n: _Draw(row=row, step=step, rewards=rewards, is_seen=is_seen) for n, row, step, rewards, is_seen in state["draws"]
        }
        with self._reporting("load_state_dict"):
            self._sampler.load_state_dict(state["state"])
