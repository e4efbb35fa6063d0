"""Cannot write an unpaired surrogate, which half of a character is."""

from wrong_plugins.loggers.base import Lines


class Logger(Lines):
    def open(self, name):
        return (self.folder / name).open("a", encoding="utf-8")
