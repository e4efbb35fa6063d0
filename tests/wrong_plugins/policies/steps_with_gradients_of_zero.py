"""Clears the gradients before it steps, so that only weight decay changes the weights."""

from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    def load(self):
        facts = super().load()
        summed = self.parallel.sum_gradients

        def cleared(parameters):
            self.state.masters.clear_gradients()
            summed(parameters)

        self.parallel.sum_gradients = cleared
        return facts


class Policy(PolicyOf):
    worker = Worker
