"""Removes the messages of each rollout before it writes them."""

from wrong_plugins.loggers.base import Lines


class Logger(Lines):
    def log_rollouts(self, rows, step):
        for row in rows:
            row.pop("messages", None)
        super().log_rollouts(rows, step)
