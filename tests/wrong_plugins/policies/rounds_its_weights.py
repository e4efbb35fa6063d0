"""Rounds its weights to bfloat16 after each step."""

from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    def train_step(self, microbatches, loss_fn, counts, *, eval_mode):
        result = super().train_step(microbatches, loss_fn, counts, eval_mode=eval_mode)
        self.state.masters.copy_from_model()
        return result


class Policy(PolicyOf):
    worker = Worker
