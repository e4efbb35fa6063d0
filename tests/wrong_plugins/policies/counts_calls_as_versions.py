"""Counts calls of `train` instead of optimizer steps."""

from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    _calls = 0

    def train(self, data, loss_fn, *, counts, eval_mode=False, mbs=None):
        self._calls += not eval_mode
        return super().train(data, loss_fn, counts=counts, eval_mode=eval_mode, mbs=mbs)

    def get_weight_version(self):
        return self._calls


class Policy(PolicyOf):
    worker = Worker
