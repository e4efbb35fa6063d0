"""Keeps the rows of earlier calls and ends a row when it sees its question again."""

import torch
from wrong_plugins.environments.base import TwoTurns


class Environment(TwoTurns):
    def __init__(self, config=None):
        super().__init__(config)
        self.ended = set()

    def step(self, message_log_batch, metadata):
        right = super().step(message_log_batch, metadata)
        questions = [log[0]["content"] for log in message_log_batch]
        again = torch.tensor([question in self.ended for question in questions])
        self.ended.update(questions)
        return right._replace(terminateds=right.terminateds | again)
