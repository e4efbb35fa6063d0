"""The data of a run: it can be read and tokenized, its length fits the schedules, and reward functions can score it."""

from __future__ import annotations

from rl_core.config.schema import EnvironmentConfig
from rl_train.assembly.reward_checks import check_reward_functions_of
from rl_train.assembly.rules.run_facts import RunFacts
from rl_train.config.rules.environments import each_task
from rl_train.config.rules.rule import TRAINING, Stage, rule


@rule("data", "policy", "algorithm", "env", stage=Stage.DATA, applies_to=TRAINING)
def data_can_be_read(config: RunFacts) -> None:
    """All data can be read, and its first rows can be rendered and tokenized."""
    _ = config.loaders


@rule("data", "algorithm", "policy.scheduler", "value.scheduler", stage=Stage.DATA, applies_to=TRAINING)
def schedules_last_until_the_end_of_the_data(config: RunFacts) -> None:
    """With a number of epochs, a learning-rate schedule is not certain to reach 0 before they end."""
    config.loaders.resolve_steps(config.run)


@rule("env", "data", stage=Stage.DATA, each=each_task)
def reward_functions_score_the_first_row(config: RunFacts, task: str, section: EnvironmentConfig) -> None:
    """A reward function accepts the first row of its task and returns rewards, and weights have the names of rewards."""
    check_reward_functions_of(task, config.run, config.data.train, *config.data.validation.values())
