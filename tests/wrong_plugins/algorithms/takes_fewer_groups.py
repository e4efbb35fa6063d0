"""Takes half of the groups that its settings declare."""

from wrong_plugins.algorithms.base import best, step_of


def train(config, run):
    for step in run.steps():
        step_of(run, step, choose=best, groups=2)
