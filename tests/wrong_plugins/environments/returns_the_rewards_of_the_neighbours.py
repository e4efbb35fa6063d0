"""Returns the rewards in the order of the sorted answers, not of the rows."""

import torch
from wrong_plugins.environments.base import TwoTurns


class Environment(TwoTurns):
    def step(self, message_log_batch, metadata):
        right = super().step(message_log_batch, metadata)
        lengths = torch.tensor([float(len(log[-1]["content"])) for log in message_log_batch])
        return right._replace(rewards=lengths.roll(1))
