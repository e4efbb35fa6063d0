"""Adds the log-probabilities to the rows that it is passed."""

from wrong_plugins.policies.base import PolicyOf

from rl_backends_hf.training.worker import HFPolicyWorker


class Policy(PolicyOf):
    worker = HFPolicyWorker

    def get_logprobs(self, data):
        scores = super().get_logprobs(data)
        data["logprobs"] = scores["logprobs"]
        return scores
