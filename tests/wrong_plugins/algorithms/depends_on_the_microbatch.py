"""Trains only on rows whose length is a multiple of the size of a microbatch."""

from wrong_plugins.algorithms.base import best, step_of


def train(config, run):
    size = run.config.policy.train_micro_batch_size

    def weighted(batch):
        batch["token_mask"] = batch["token_mask"] * (batch["input_lengths"] % size == 0).float().unsqueeze(1)

    for step in run.steps():
        step_of(run, step, choose=best, prepare=weighted)
