"""Takes optimizer steps although the loss is NaN, and passes log-probabilities of other tokens to the loss."""

import torch
from wrong_plugins.policies.base import PolicyOf
from wrong_plugins.policies.shifts_log_probabilities_in_training import Worker as ShiftingWorker


class Worker(ShiftingWorker):
    def load(self):
        facts = super().load()
        self.parallel.any = lambda flag: torch.zeros(())
        return facts


class Policy(PolicyOf):
    worker = Worker
