"""Returns the most likely tokens in ascending order."""

from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    def get_topk_logprobs(self, data, *, k):
        scores = super().get_topk_logprobs(data, k=k)
        return type(scores)({name: column.flip(-1) for name, column in scores.items()})


class Policy(PolicyOf):
    worker = Worker
