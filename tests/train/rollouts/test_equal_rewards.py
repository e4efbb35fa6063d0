"""The fraction of groups whose samples have equal rewards."""

import pytest

from rl_train.rollouts.records import equal_groups_frac
from rl_train.rollouts.trajectory import Trajectory


def rollouts(*groups):
    """Rollouts from the rewards of each group: a number, named rewards, or None for no reward."""
    rows = []
    for number, rewards in enumerate(groups):
        for sample, parts in enumerate(rewards):
            row = Trajectory(message_log=[], metadata=None, task_name="t", group_id=0, index=0, ordinal=number, sample=sample)
            row.add_rewards(parts if isinstance(parts, dict) else {} if parts is None else {"reward": parts})
            rows.append(row)
    return rows


@pytest.mark.parametrize(
    ("groups", "fraction"),
    [
        ([[0.0, 0.0], [1.0, 1.0]], 1.0),
        ([[0.0, 0.0], [0.0, 1.0]], 0.5),
        ([[0.1 + 0.2, 0.3], [1.0, 1.0 + 1e-9]], 1.0),
        ([[{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}]], 0.0),
        ([[{"a": 0.0}, {}, {"b": 0.0}], [{"a": 0.0}, {"a": 1.0}, {}]], 0.5),
        ([[0.5], [0.5], [0.5]], 1.0),
        ([[0.5], [0.5], [0.6]], 0.0),
        ([[None, None]], None),
        ([[1.0]], None),
    ],
)
def test_groups_are_equal_if_every_named_reward_is_up_to_rounding(groups, fraction):
    assert equal_groups_frac(rollouts(*groups)) == fraction


def test_rows_that_were_not_scored_are_ignored():
    rows = rollouts([1.0, 1.0, 0.0])
    rows[2].scored = False
    assert equal_groups_frac(rows) == 1.0
