"""Takes optimizer steps although the loss is NaN."""

import torch
from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    def load(self):
        facts = super().load()
        self.parallel.any = lambda flag: torch.zeros(())
        return facts


class Policy(PolicyOf):
    worker = Worker
