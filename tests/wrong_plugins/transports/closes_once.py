"""Closing it a second time is an error."""

from wrong_plugins.transports.base import Files


class Transport(Files):
    closed = False

    def close(self):
        if self.closed:
            raise RuntimeError("the transport is closed")
        self.closed = True
