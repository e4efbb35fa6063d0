"""Trains on fewer rows in each step, and begins again with all of them after a resume."""

from wrong_plugins.algorithms.base import best, step_of


def train(config, run):
    rows = 8
    for step in run.steps():
        step_of(run, step, choose=lambda batch, rows=rows: best(batch)[:rows])
        rows -= 1
