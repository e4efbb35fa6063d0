"""The data of a run: it can be read and tokenized, its length fits the schedules, and reward functions can score it."""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.config.diagnostics import Problem
from rl_core.config.schema import EnvironmentConfig
from rl_core.plugins.import_path import missing_target
from rl_train.assembly.reward_checks import check_reward_functions_of
from rl_train.assembly.rules.run_facts import RunFacts
from rl_train.config.rules.environments import each_task
from rl_train.config.rules.rule import TRAINING, Stage, Use, rule
from rl_train.config.rules.schedules import schedule_problems, schedule_warnings

_SCHEDULES = ("data", "algorithm", "policy.scheduler", "value.scheduler", "policy.train_global_batch_size", "cluster")


@rule("data", "policy", "algorithm", "env", stage=Stage.DATA, applies_to=TRAINING | {Use.EVAL})
def data_can_be_read(config: RunFacts) -> None:
    """All data can be read, and its first rows can be rendered and tokenized."""
    _ = config.loaders


@rule(*_SCHEDULES, stage=Stage.DATA, applies_to=TRAINING)
def schedules_last_until_the_end_of_the_data(config: RunFacts) -> Iterator[Problem]:
    """With a number of epochs, a learning-rate schedule is not certain to reach 0 before they end."""
    yield from schedule_problems(config.in_steps)


@rule(*_SCHEDULES, stage=Stage.DATA, applies_to=TRAINING, warns=True)
def schedules_fit_the_data(config: RunFacts) -> Iterator[Problem]:
    """A learning-rate schedule does not end before the run, and its warm-up does."""
    yield from schedule_warnings(config.in_steps)


@rule("env", "data", stage=Stage.DATA, each=each_task)
def reward_functions_score_the_first_row(config: RunFacts, task: str, section: EnvironmentConfig) -> None:
    """A reward function accepts the first row of its task and returns rewards, and weights have the names of rewards."""
    if not any(map(missing_target, getattr(section, "functions", {}).values())):  # those are reported already
        check_reward_functions_of(task, config.run, config.data.train, *config.data.validation.values())
