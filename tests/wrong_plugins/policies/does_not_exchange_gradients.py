"""Each rank steps with its own gradient."""

from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.parallel import Parallel
from rl_backends_hf.training.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    def load(self):
        facts = super().load()
        self._parallel.sum_gradients = lambda parameters: Parallel.sum_gradients(self._parallel, parameters)
        return facts


class Policy(PolicyOf):
    worker = Worker
