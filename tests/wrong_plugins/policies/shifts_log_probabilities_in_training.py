"""Passes log-probabilities to the loss one position too early."""

from wrong_plugins.policies.base import PolicyOf, TrainsOnOtherScores


class Worker(TrainsOnOtherScores):
    def altered(self, logprobs):
        return logprobs.roll(-1, dims=1)


class Policy(PolicyOf):
    worker = Worker
