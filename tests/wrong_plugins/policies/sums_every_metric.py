"""Adds up the metrics of microbatches that are smallest or largest values."""

from wrong_plugins.policies.base import OtherLoss, PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    def train_step(self, microbatches, loss_fn, counts, *, eval_mode):
        summed = OtherLoss(loss_fn, lambda loss, metrics: (loss, metrics))
        summed.metric_reductions = {}
        return super().train_step(microbatches, summed, counts, eval_mode=eval_mode)


class Policy(PolicyOf):
    worker = Worker
