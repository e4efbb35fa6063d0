"""Clears the gradients before each microbatch."""

from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    def train_step(self, microbatches, loss_fn, counts, *, eval_mode):
        return super().train_step(self._cleared(microbatches), loss_fn, counts, eval_mode=eval_mode)

    def _cleared(self, microbatches):
        for microbatch in microbatches:
            self.state.masters.clear_gradients()
            yield microbatch


class Policy(PolicyOf):
    worker = Worker
