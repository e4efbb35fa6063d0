"""Prints each step, in the middle of the display."""

from wrong_plugins.loggers.base import Lines


class Logger(Lines):
    def log_metrics(self, metrics, step):
        super().log_metrics(metrics, step)
        print(f"step {step} {metrics.get('loss')}")
