"""The section `rollout`: how failed rollouts are treated."""

import pytest

from rl_train.config.schema import RolloutConfig


def test_more_scored_rows_than_samples_are_refused(files, good):
    text = good.replace("grpo:\n", "grpo:\n  num_generations_per_prompt: 4\n")
    assert files.load(text + "rollout: {min_scored: 4}\n").run.rollout.min_scored == 4
    [error] = files.errors(text + "rollout: {min_scored: 5}\n")
    assert error.endswith(
        "rollout.min_scored: 5 scored rows are more than the 4 samples of a group, so every group would be replaced. Set it "
        "to 4 or less."
    )


@pytest.mark.parametrize(("group_size", "needed"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 3), (8, 4)])
def test_half_of_a_group_and_at_least_two_rows_must_be_scored_by_default(group_size, needed):
    assert RolloutConfig().min_scored_of(group_size) == needed
