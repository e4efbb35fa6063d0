"""Subtracts the mean from the rewards of its rows in place."""

from wrong_plugins.algorithms.base import best, step_of


def choose(batch):
    batch["rewards"] -= batch["rewards"].mean()
    return best(batch)


def train(config, run):
    for step in run.steps():
        step_of(run, step, choose=choose)
