"""What the environments here have in common: two turns, of which the first repeats the question and the second is scored."""

import torch

from rl_core.interfaces import EnvironmentInterface, EnvironmentReturn
from rl_envs import ArithmeticEnvironment


class TwoTurns(EnvironmentInterface):
    """Returns `altered` results of right steps."""

    def __init__(self, config=None):
        self._arithmetic = ArithmeticEnvironment({})

    def step(self, message_log_batch, metadata):
        scored = self._arithmetic.step(message_log_batch, metadata)
        is_second = [info.get("turn", 1) == 2 for info in metadata]
        right = EnvironmentReturn(
            observations=[{"role": "environment", "content": log[0]["content"]} for log in message_log_batch],
            metadata=[{**info, "turn": 2} for info in metadata],
            next_stop_strings=[None] * len(metadata),
            rewards=scored.rewards * torch.tensor(is_second),
            terminateds=torch.tensor(is_second),
        )
        return self.altered(right)

    def altered(self, right):
        return right

    def global_post_process_and_metrics(self, batch):
        return batch, {}
