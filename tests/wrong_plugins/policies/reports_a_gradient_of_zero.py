"""Takes no step, and reports the gradient norm 0."""

from dataclasses import replace

from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    def train_step(self, microbatches, loss_fn, counts, *, eval_mode):
        result = super().train_step(microbatches, loss_fn, counts, eval_mode=True)
        if not eval_mode:
            self.state.weight_version += 1
        return replace(result, grad_norm=0.0, lr=0.01)


class Policy(PolicyOf):
    worker = Worker
