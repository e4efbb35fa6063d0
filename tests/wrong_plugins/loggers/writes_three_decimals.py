"""Rounds every value to three decimals, so that a small learning rate becomes zero."""

from wrong_plugins.loggers.base import Lines


class Logger(Lines):
    def log_metrics(self, metrics, step):
        super().log_metrics({name: round(value, 3) for name, value in metrics.items()}, step)
