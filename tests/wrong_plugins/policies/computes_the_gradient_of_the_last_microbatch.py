"""Runs the backward pass of the last microbatch only."""

from wrong_plugins.policies.base import OtherLoss, PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    def train_step(self, microbatches, loss_fn, counts, *, eval_mode):
        microbatches = list(microbatches)
        left = len(microbatches)

        def change(loss, metrics):
            nonlocal left
            left -= 1
            return loss if left == 0 else loss.detach().requires_grad_(), metrics

        return super().train_step(iter(microbatches), OtherLoss(loss_fn, change), counts, eval_mode=eval_mode)


class Policy(PolicyOf):
    worker = Worker
