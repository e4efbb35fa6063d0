"""Does not report how many parameters its model has."""

from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    def load(self):
        facts = super().load()
        del facts["num_parameters"]
        return facts


class Policy(PolicyOf):
    worker = Worker
