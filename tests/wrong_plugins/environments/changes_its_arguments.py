"""Writes the turn into the metadata and the messages that it was passed."""

from wrong_plugins.environments.base import TwoTurns


class Environment(TwoTurns):
    def step(self, message_log_batch, metadata):
        for log, info in zip(message_log_batch, metadata, strict=True):
            log[-1]["content"] = log[-1]["content"].strip()
            info["seen"] = True
        return super().step(message_log_batch, metadata)
