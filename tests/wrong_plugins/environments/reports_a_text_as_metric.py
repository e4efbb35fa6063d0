"""One of its metrics is a text."""

from wrong_plugins.environments.base import TwoTurns


class Environment(TwoTurns):
    def global_post_process_and_metrics(self, batch):
        return batch, {"mood": "good"}
