"""Passes the log-probabilities of the rows of a microbatch to the loss in reversed order."""

from wrong_plugins.policies.base import PolicyOf, TrainsOnOtherScores


class Worker(TrainsOnOtherScores):
    def altered(self, logprobs):
        return logprobs.flip(0)


class Policy(PolicyOf):
    worker = Worker
