"""Refuses NaN, which the loss of a diverging run has."""

import json

from wrong_plugins.loggers.base import METRICS, Lines


class Logger(Lines):
    def log_metrics(self, metrics, step):
        self.files[METRICS].write(json.dumps({"step": step, **metrics}, allow_nan=False) + "\n")
