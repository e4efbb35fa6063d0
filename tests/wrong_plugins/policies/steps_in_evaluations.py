"""Takes an optimizer step in evaluations as well."""

from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    def train_step(self, microbatches, loss_fn, counts, *, eval_mode):
        return super().train_step(microbatches, loss_fn, counts, eval_mode=False)


class Policy(PolicyOf):
    worker = Worker
