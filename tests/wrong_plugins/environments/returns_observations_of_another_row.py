"""Continues each row with the question of the row before it."""

from wrong_plugins.environments.base import TwoTurns


class Environment(TwoTurns):
    def altered(self, right):
        return right._replace(observations=[*right.observations[-1:], *right.observations[:-1]])
