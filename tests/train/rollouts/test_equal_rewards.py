"""A run whose rewards never differ within a group gives one warning, with the steps."""

import logging

import pytest

from rl_train.rollouts.equal_rewards import WARN_AFTER, EqualRewardWatch
from rl_train.rollouts.trajectory import Trajectory


@pytest.fixture
def watched(caplog, own_messages):
    """Passes draws (a step and the rewards of each group) to one watch; returns the warnings so far."""
    watch = EqualRewardWatch()

    def observe(step, *groups):
        rows = []
        for number, rewards in enumerate(groups):
            for sample, parts in enumerate(rewards):
                row = Trajectory(
                    message_log=[], metadata=None, task_name="t", group_id=number, index=0, ordinal=0, sample=sample
                )
                row.add_rewards(parts if isinstance(parts, dict) else {} if parts is None else {"reward": parts})
                rows.append(row)
        with caplog.at_level(logging.WARNING, logger="rlcore"):
            watch.observe(step, rows)
        return own_messages()

    return observe


def test_equal_groups_for_several_steps_in_a_row_are_warned_of_once(watched):
    for step in range(1, WARN_AFTER):
        assert watched(step, [0.0, 0.0], [1.0, 1.0]) == []
    [warning] = watched(WARN_AFTER, [0.0, 0.0], [1.0, 1.0])
    assert warning.startswith(f"steps 1 to {WARN_AFTER}: the samples of each prompt all had equal rewards")
    assert "(in the last step 0, 1)" in warning
    assert len(watched(WARN_AFTER + 1, [0.0, 0.0], [1.0, 1.0])) == 1


def test_a_difference_in_one_group_starts_the_count_again(watched):
    for step in range(1, WARN_AFTER):
        watched(step, [0.0, 0.0])
    watched(WARN_AFTER, [0.0, 0.0], [0.0, 1.0])
    for step in range(WARN_AFTER + 1, 2 * WARN_AFTER):
        assert watched(step, [0.0, 0.0]) == []
    assert len(watched(2 * WARN_AFTER, [0.0, 0.0])) == 1


def test_the_draws_of_one_step_count_as_one_step(watched):
    for _ in range(3 * WARN_AFTER):
        assert watched(1, [0.0, 0.0]) == []


def test_named_rewards_are_compared_one_by_one(watched):
    for step in range(1, 2 * WARN_AFTER):
        assert watched(step, [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}]) == []


def test_with_one_sample_of_each_prompt_all_rows_are_compared(watched):
    for step in range(1, 2 * WARN_AFTER):
        assert watched(step, [0.0], [1.0]) == []
    for step in range(2 * WARN_AFTER, 3 * WARN_AFTER):
        warnings = watched(step, [0.5], [0.5])
    assert len(warnings) == 1


def test_rollouts_without_an_environment_have_no_rewards_to_compare(watched):
    for step in range(1, 2 * WARN_AFTER):
        assert watched(step, [None, None]) == []
