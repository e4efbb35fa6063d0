"""Returns texts instead of messages."""

from wrong_plugins.environments.base import TwoTurns


class Environment(TwoTurns):
    def altered(self, right):
        return right._replace(observations=[message["content"] for message in right.observations])
