"""Returns the scores of the microbatches in reversed order."""

from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    def score_microbatches(self, microbatches, *, topk=None, reference=False):
        return super().score_microbatches(microbatches, topk=topk, reference=reference)[::-1]


class Policy(PolicyOf):
    worker = Worker
