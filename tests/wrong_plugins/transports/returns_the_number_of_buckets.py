"""Returns how many buckets it sent, instead of their bytes."""

from wrong_plugins.transports.base import Files


class Transport(Files):
    def push(self, policy, generation):
        super().push(policy, generation)
        return len(self.buckets(policy))
