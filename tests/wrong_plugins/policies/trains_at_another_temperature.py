"""Passes log-probabilities of another temperature to the loss."""

from wrong_plugins.policies.base import PolicyOf, TrainsOnOtherScores


class Worker(TrainsOnOtherScores):
    def altered(self, logprobs):
        return logprobs * 0.9


class Policy(PolicyOf):
    worker = Worker
