"""The right control: files as they are."""

from wrong_plugins.transports.base import Files


class Transport(Files):
    pass
