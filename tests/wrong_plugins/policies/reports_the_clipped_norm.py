"""Reports the norm of the gradient after clipping."""

from dataclasses import replace

from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    def train_step(self, microbatches, loss_fn, counts, *, eval_mode):
        result = super().train_step(microbatches, loss_fn, counts, eval_mode=eval_mode)
        return replace(result, grad_norm=min(result.grad_norm, self.config.max_grad_norm))


class Policy(PolicyOf):
    worker = Worker
