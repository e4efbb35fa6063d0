"""Returns the scores of its first call again if rows of the same shape are to be scored."""

from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Worker(HFPolicyWorker):
    _scores = None

    def get_logprobs(self, data, *, reference=False):
        scores = super().get_logprobs(data, reference=reference)
        if self._scores is None or self._scores["logprobs"].shape != scores["logprobs"].shape:
            self._scores = scores
        return self._scores


class Policy(PolicyOf):
    worker = Worker
