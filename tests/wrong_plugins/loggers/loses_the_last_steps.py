"""Writes two steps at a time, and `finish` does not write the rest."""

from wrong_plugins.loggers.base import Lines


class Logger(Lines):
    def __init__(self, *, config, folder):
        super().__init__(config=config, folder=folder)
        self.waiting = []

    def log_metrics(self, metrics, step):
        self.waiting.append((metrics, step))
        if len(self.waiting) == 3:
            for each in self.waiting:
                super().log_metrics(*each)
            self.waiting = []
