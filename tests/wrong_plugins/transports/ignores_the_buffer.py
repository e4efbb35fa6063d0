"""Sends all weights at once."""

from wrong_plugins.transports.base import Files


class Transport(Files):
    def buckets(self, policy):
        # The first bucket is sent alone, so that there is a time to look at the deadline.
        first, *others = super().buckets(policy)
        return [first, [name for names in others for name in names]]
