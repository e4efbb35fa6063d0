"""Reports a metric that is not a number in its second step."""

from wrong_plugins.algorithms.base import best, step_of


def train(config, run):
    for step in run.steps():
        step_of(run, step, choose=best)
        run.metrics.add({"best/gain": float("nan") if step == 2 else 1.0})
