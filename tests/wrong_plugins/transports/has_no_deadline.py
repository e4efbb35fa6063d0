"""Waits for the engine for any time."""

from dataclasses import replace

from wrong_plugins.transports.base import Files


class Transport(Files):
    def __init__(self, context):
        super().__init__(replace(context, deadline_s=float("inf")))
