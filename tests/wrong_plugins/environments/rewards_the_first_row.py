"""Gives the first row of a call the sum of all rewards, as a sum over the wrong dimension does."""

from wrong_plugins.environments.base import TwoTurns


class Environment(TwoTurns):
    def altered(self, right):
        rewards = right.rewards.clone()
        rewards[0] = len(rewards)
        return right._replace(rewards=rewards)
