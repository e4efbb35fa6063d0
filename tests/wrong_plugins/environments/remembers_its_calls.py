"""Rewards later calls more than earlier ones."""

from wrong_plugins.environments.base import TwoTurns


class Environment(TwoTurns):
    calls = 0

    def altered(self, right):
        self.calls += 1
        return right._replace(rewards=right.rewards + self.calls)
