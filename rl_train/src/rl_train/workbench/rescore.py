"""Scores the stored rollouts of a run again (`rlcore env rescore`)."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.errors import ConfigError, DataError
from rl_core.interfaces.environment import EnvironmentInterface
from rl_core.interfaces.records import plain_text
from rl_core.plugins.manager import discover
from rl_core.plugins.registry import Registry
from rl_core.testing.environments.checks import LocalRollouts, TrialRow
from rl_train.assembly.data import Source
from rl_train.assembly.preparation import Preparation
from rl_train.config.loader import load_config
from rl_train.config.schema import RunConfig
from rl_train.data.conversations import without_answer
from rl_train.metrics.jsonl import iter_jsonl
from rl_train.run_folders.run_folder import CONFIG
from rl_train.workbench.instances import environment_factory

ROUNDING = 1e-5
"""Rewards are equal if they differ by at most this, relative to their size: the stored ones are float32."""
_STEP_FILE = re.compile(r"step_(\d{6,})\.jsonl")


@dataclass(frozen=True, kw_only=True)
class RescoredRollout:
    """A stored rollout and its new rewards."""

    step: int
    task: str
    index: int
    """Index of the prompt in its dataset."""
    sample: int
    completion: str
    before: Mapping[str, float]
    """Stored rewards by name, without weights."""
    after: Mapping[str, float]
    """New ones."""
    was_scored: bool
    is_scored: bool

    @property
    def differs(self) -> bool:
        """Whether a reward, or whether the row was scored, is different."""
        return self.was_scored != self.is_scored or any(
            abs(self.before.get(name, 0.0) - self.after.get(name, 0.0)) > ROUNDING * max(1.0, abs(self.before.get(name, 0.0)))
            for name in {*self.before, *self.after}
        )


def rescore(
    folder: Path, overrides: Sequence[str] = (), *, config: Path | None = None, steps: Sequence[int] | None = None
) -> Iterator[RescoredRollout]:
    """Score the rollouts of a run folder again, with the environments of its config.

    The metadata of the rows is read from the data of the config; the prompts must be the same.

    Args:
        folder: the run folder.
        overrides: changes of the config, `key=value`.
        config: a config other than that of the run.
        steps: only these steps; all by default. Step 0 is the validation before the first step.

    Raises:
        ConfigError: the folder has no rollouts, or the config has no such environment.
        DataError: the data of the config is not that of the run.
    """
    files = {
        int(match.group(1)): path
        for path in sorted(folder.glob("rollouts/step_*.jsonl"))
        if (match := _STEP_FILE.fullmatch(path.name))
    }
    selected_steps = sorted(files if steps is None else set(steps))
    missing = [step for step in selected_steps if step not in files]
    if missing or not files:
        what = f"no rollouts of step {missing[0]}" if missing else "no rollouts"
        raise ConfigError(f"{folder} has {what}: give the folder of a run, which has rollouts/step_000001.jsonl.")
    registry = Registry(discover())
    prepared = Preparation(load_config(config or folder / CONFIG, list(overrides), registry=registry).run, registry)
    run, data = prepared.scoring_config, prepared.data
    with ExitStack() as exits:
        environments = {}
        for task, section in run.env.items():
            make, _ = environment_factory(task, section, registry)
            environments[task] = make()
            exits.callback(environments[task].shutdown)
        for step in selected_steps:
            yield from _of_step(
                step, iter_jsonl(files[step]), list(data.validation.values()) if step == 0 else [data.train], environments, run
            )


def _of_step(
    step: int,
    records: Iterable[Mapping[str, Any]],
    sources: Sequence[Source | None],
    environments: Mapping[str, EnvironmentInterface],
    run: RunConfig,
) -> Iterator[RescoredRollout]:
    by_task: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        by_task[record["task"]].append(record)
    for task, rows in by_task.items():
        if task not in environments:
            raise ConfigError(f"The rollouts have the task {task!r}, but `env` only has {', '.join(run.env) or 'none'}.")
        if run.env[task].agent is not None:
            raise ConfigError(
                f"env.{task} has an agent, which decides what is scored, so its rollouts cannot be scored again without it."
            )
        scored = _replay(environments[task], task, rows, [_metadata(row, sources, step) for row in rows])
        for row, (after, is_scored) in zip(rows, scored, strict=True):
            yield RescoredRollout(
                step=step,
                task=task,
                index=row["index"],
                sample=row["sample"],
                completion=row["completion"],
                before=row["reward_parts"],
                after=after,
                was_scored=row.get("scored", True),
                is_scored=is_scored,
            )


def _metadata(record: Mapping[str, Any], sources: Sequence[Source | None], step: int) -> Any:
    """The metadata of a rollout's prompt, from the first dataset that has this prompt at this index."""
    index = record["index"]
    for source in sources:
        original = source.records[index] if source is not None and index < len(source.records) else None
        prompt = (
            [plain_text(each["content"]) for each in without_answer(original["messages"])] if original is not None else None
        )
        recorded = [plain_text(message["content"]) for message in record["messages"]]
        if original is not None and prompt and prompt == recorded[: len(prompt)]:
            return copy.deepcopy(original.get("extra_env_info"))
    names = ", ".join(source.name for source in sources if source is not None) or "the config, which has no such data"
    raise DataError(
        f"Row {index} of {names} is not the prompt of a rollout of step {step}: the data has changed since the run, or bad "
        "rows were skipped. Rollouts can only be scored again with the same data."
    )


def _replay(
    environment: EnvironmentInterface, task: str, rows: Sequence[Mapping[str, Any]], metadata: list[Any]
) -> list[tuple[dict[str, float], bool]]:
    """The rewards of each rollout, summed over its turns, and whether all of them were scored."""
    turn_ends = [
        [i + 1 for i, message in enumerate(row["messages"]) if message["role"] == "assistant"][-row["turns"] :]
        if row["turns"]
        else []
        for row in rows
    ]
    rewards: list[dict[str, float]] = [{} for _ in rows]
    is_scored = [True] * len(rows)
    starts = [TrialRow(messages=[], metadata=info) for info in metadata]
    with LocalRollouts(environment, task, starts, session="rescore") as rollouts:
        for turn in range(max(map(len, turn_ends), default=0)):
            logs = {row: list(rows[row]["messages"][: ends[turn]]) for row, ends in enumerate(turn_ends) if turn < len(ends)}
            for row, result in rollouts.step(logs).items():
                for name, value in result.rewards.items():
                    rewards[row][name] = rewards[row].get(name, 0.0) + value
                is_scored[row] = is_scored[row] and result.scored
    return list(zip(rewards, is_scored, strict=True))
