"""Writes each step when it is logged, and all of them again at the end."""

from wrong_plugins.loggers.base import Lines


class Logger(Lines):
    def __init__(self, *, config, folder):
        super().__init__(config=config, folder=folder)
        self.logged = []

    def log_metrics(self, metrics, step):
        super().log_metrics(metrics, step)
        self.logged.append((dict(metrics), step))

    def finish(self):
        for metrics, step in self.logged:
            super().log_metrics(metrics, step)
        self.logged = []
        super().finish()
