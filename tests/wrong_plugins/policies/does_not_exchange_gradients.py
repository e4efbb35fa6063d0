"""Each rank steps with its own gradient."""

from wrong_plugins.policies.base import PolicyOf

from rl_backends_base.parallel import fill_missing_gradients
from rl_backends_hf.training.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    def load(self):
        facts = super().load()
        self.parallel.sum_gradients = fill_missing_gradients
        return facts


class Policy(PolicyOf):
    worker = Worker
