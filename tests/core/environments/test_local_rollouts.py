"""Rollouts of an environment whose answers come from the caller."""

from rl_core.environments import StepResult, environment_return
from rl_core.interfaces import EnvironmentInterface
from rl_core.testing.environments.checks import LocalRollouts, TrialRow


class Quiet(EnvironmentInterface):
    """Returns metadata only in its first turn."""

    def step(self, message_log_batch, metadata):
        again = {"role": "environment", "content": "again"}
        return environment_return(
            [
                StepResult(observation=again, metadata=None if "turn" in info else {"turn": 1}, rewards={}, terminated=False)
                for info in metadata
            ]
        )


def test_metadata_of_none_keeps_the_state_of_the_turn_before():
    row = TrialRow(messages=[{"role": "user", "content": "?"}], metadata={})
    with LocalRollouts(Quiet(), "quiet", [row], session="s") as rollouts:
        rollouts.answer({0: "one"})
        rollouts.answer({0: "two"})
        assert rollouts.metadata == [{"turn": 1}]
