"""Subtracts the mean reward of a call from its rewards, so that a row is worth more next to wrong answers."""

from rl_envs import ArithmeticEnvironment


class Environment(ArithmeticEnvironment):
    def __init__(self, config=None):
        super().__init__({})

    def step(self, message_log_batch, metadata):
        right = super().step(message_log_batch, metadata)
        return right._replace(rewards=right.rewards - right.rewards.mean())
