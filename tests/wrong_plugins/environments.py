"""Environments that break a promise of environments.

All have two turns, of which the first repeats the question and the second is scored.
"""

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


class Right(TwoTurns):
    """Keeps every promise."""

    def altered(self, right):
        return right


class AnswersRowsAgainThatHaveEnded(TwoTurns):
    """Keeps the rows of earlier calls and ends a row when it sees its question again."""

    def __init__(self, config=None):
        super().__init__(config)
        self.ended = set()

    def step(self, message_log_batch, metadata):
        right = super().step(message_log_batch, metadata)
        questions = [log[0]["content"] for log in message_log_batch]
        again = torch.tensor([question in self.ended for question in questions])
        self.ended.update(questions)
        return right._replace(terminateds=right.terminateds | again)


class ChangesItsArguments(TwoTurns):
    """Writes the turn into the metadata and the messages that it was passed."""

    def step(self, message_log_batch, metadata):
        for log, info in zip(message_log_batch, metadata, strict=True):
            log[-1]["content"] = log[-1]["content"].strip()
            info["seen"] = True
        return super().step(message_log_batch, metadata)


class DropsTheMetadataOfARow(TwoTurns):
    """Leaves out the metadata of its last row."""

    def altered(self, right):
        return right._replace(metadata=right.metadata[:-1])


class EndsAnotherRow(TwoTurns):
    """Reports the end of each row for the row after it."""

    def altered(self, right):
        return right._replace(terminateds=torch.arange(len(right.terminateds)) % 2 == 1)


class EndsRowsByHalf(TwoTurns):
    """Says 0.5 for rows of which it is not sure that they have ended."""

    def altered(self, right):
        return right._replace(terminateds=torch.full_like(right.rewards, 0.5))


class ObservesWithoutARole(TwoTurns):
    """Returns texts instead of messages."""

    def altered(self, right):
        return right._replace(observations=[message["content"] for message in right.observations])


class RemembersItsCalls(TwoTurns):
    """Rewards later calls more than earlier ones."""

    calls = 0

    def altered(self, right):
        self.calls += 1
        return right._replace(rewards=right.rewards + self.calls)


class ReportsATextAsMetric(TwoTurns):
    """One of its metrics is a text."""

    def global_post_process_and_metrics(self, batch):
        return batch, {"mood": "good"}


class ReturnsANanReward(TwoTurns):
    """Returns NaN as the reward of its first row."""

    def altered(self, right):
        return right._replace(rewards=right.rewards.index_fill(0, torch.tensor([0]), float("nan")))


class ReturnsMetadataOfAnotherRow(TwoTurns):
    """Passes the metadata of each row to the row after it, so it is scored by another answer in the next turn."""

    def altered(self, right):
        return right._replace(metadata=[*right.metadata[-1:], *right.metadata[:-1]])


class ReturnsObservationsOfAnotherRow(TwoTurns):
    """Continues each row with the question of the row before it."""

    def altered(self, right):
        return right._replace(observations=[*right.observations[-1:], *right.observations[:-1]])


class ReturnsTheRewardsOfTheNeighbours(TwoTurns):
    """Returns the rewards in the order of the sorted answers, not of the rows."""

    def step(self, message_log_batch, metadata):
        right = super().step(message_log_batch, metadata)
        lengths = torch.tensor([float(len(log[-1]["content"])) for log in message_log_batch])
        return right._replace(rewards=lengths.roll(1))


class ReturnsTooFewRewards(TwoTurns):
    """Leaves out the reward of its last row."""

    def altered(self, right):
        return right._replace(rewards=right.rewards[:-1])


class RewardsTheFirstRow(TwoTurns):
    """Gives the first row of a call the sum of all rewards, as a sum over the wrong dimension does."""

    def altered(self, right):
        rewards = right.rewards.clone()
        rewards[0] = len(rewards)
        return right._replace(rewards=rewards)


class SubtractsTheMeanOfTheCall(ArithmeticEnvironment):
    """Subtracts the mean reward of a call from its rewards, so that a row is worth more next to wrong answers."""

    def __init__(self, config=None):
        super().__init__({})

    def step(self, message_log_batch, metadata):
        right = super().step(message_log_batch, metadata)
        return right._replace(rewards=right.rewards - right.rewards.mean())


class TakesTwoArguments(TwoTurns):
    """Its constructor has an argument that no config can give."""

    def __init__(self, config, tokenizer):
        super().__init__(config)
