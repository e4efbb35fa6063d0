"""Continues without a file if it cannot open one."""

import io

from wrong_plugins.loggers.base import Lines


class Logger(Lines):
    def open(self, name):
        try:
            return super().open(name)
        except OSError:
            return io.StringIO()
