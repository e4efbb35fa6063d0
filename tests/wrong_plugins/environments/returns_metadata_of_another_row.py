"""Passes the metadata of each row to the row after it, so it is scored by another answer in the next turn."""

from wrong_plugins.environments.base import TwoTurns


class Environment(TwoTurns):
    def altered(self, right):
        return right._replace(metadata=[*right.metadata[-1:], *right.metadata[:-1]])
