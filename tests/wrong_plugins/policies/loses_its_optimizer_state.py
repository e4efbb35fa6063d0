"""Continues from a checkpoint without the state of the optimizer."""

from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    def load_training_state(self, folder):
        super().load_training_state(folder)
        self.state.optimizer.state.clear()


class Policy(PolicyOf):
    worker = Worker
