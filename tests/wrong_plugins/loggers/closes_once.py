"""Closing it a second time is an error."""

from wrong_plugins.loggers.base import Lines


class Logger(Lines):
    def finish(self):
        for name in list(self.files) or ["nothing to close"]:
            self.files.pop(name).close()
