"""Returns the mean of each metric over the microbatches, also of metrics that are shares of a sum."""

from wrong_plugins.policies.base import OtherLoss, PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    def train_step(self, microbatches, loss_fn, counts, *, eval_mode):
        microbatches = list(microbatches)
        share = 1 / len(microbatches)
        averaged = OtherLoss(loss_fn, lambda loss, metrics: (loss, {name: value * share for name, value in metrics.items()}))
        averaged.metric_reductions = {}
        return super().train_step(iter(microbatches), averaged, counts, eval_mode=eval_mode)


class Policy(PolicyOf):
    worker = Worker
