"""Scores with its present weights as the reference policy."""

from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    def get_logprobs(self, data, *, reference=False):
        return super().get_logprobs(data)


class Policy(PolicyOf):
    worker = Worker
