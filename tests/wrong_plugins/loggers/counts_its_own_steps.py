"""Numbers the steps itself, from 1, and so again after a resume."""

from wrong_plugins.loggers.base import Lines


class Logger(Lines):
    count = 0

    def log_metrics(self, metrics, step):
        self.count += 1
        super().log_metrics(metrics, self.count)
