"""Recorded rollouts: their batches are exactly those that were trained, and incomplete records are refused."""

import json

import pytest
import torch

from rl_core.errors import UserError
from rl_train.metrics.jsonl import JsonlLogger
from rl_train.rollouts.records import rollout_records
from rl_train.rollouts.source import ReplaySource, Selection
from rl_train.rollouts.trajectory import Trajectory, to_batch

GROUP = 2
NOT_RECORDED = ("message_log", "extra_env_info")


def rollout(number, turns, *, rewritten=False, failed=False):
    """Turns whose tokens have log-probabilities that need all bits of a float32, and several versions."""
    prompt = [
        {"role": "user", "content": "q", "token_ids": torch.tensor([3, 4])},
        {"role": "assistant", "content": "shot", "token_ids": torch.tensor([5])},
    ]
    group, sample = divmod(number, GROUP)
    numbers = {"group_id": group, "index": group, "ordinal": 7 + group, "sample": sample}
    row = Trajectory(message_log=prompt, metadata=object(), task_name="t", **numbers)
    row.reward_weights = {"format": 0.1}
    for turn in range(turns):
        logprobs = -torch.rand(3, generator=torch.Generator().manual_seed(10 * number + turn)) * 1e-3 - 1 / 3
        versions = torch.tensor([2, 2, 3]) if turn == 1 else None
        tokens = torch.tensor([turn, 8, 9])
        row.add_answer(f"turn {turn}", tokens, logprobs, weight_version=2 + turn // 2, token_versions=versions)
        row.add_rewards({"right": 1 / 3, "format": 0.7})
        if rewritten and turn + 1 < turns:
            row.start_segment({"role": "environment", "content": "o"}, torch.tensor([3, 6, 6, turn]))
        elif turn + 1 < turns or failed:
            row.add_observation({"role": "environment", "content": "o"}, torch.tensor([6, 7]))
    if failed:
        row.fail("TimeoutError", "late")
    row.loss_multiplier = 0.5
    row.baseline_reward = 0.1 + group / 3
    return row


@pytest.fixture
def rollouts():
    cases = [(1, {}), (1, {}), (3, {}), (2, {"rewritten": True}), (0, {}), (2, {"failed": True})]
    return [rollout(number, turns, **options) for number, (turns, options) in enumerate(cases)]


@pytest.fixture
def source(tmp_path, rollouts):
    JsonlLogger(tmp_path).log_rollouts(json.loads(json.dumps(rollout_records(rollouts))), 1)
    return ReplaySource(tmp_path, group_size=GROUP, reward_weights={"t": {"format": 0.1}})


def test_a_replayed_batch_equals_the_recorded_one_in_every_column_that_training_reads(source, rollouts):
    expected, found = to_batch(rollouts), source.take(1, 3).batch
    assert found.keys() == expected.keys()
    for key in expected.keys() - {*NOT_RECORDED}:
        if isinstance(expected[key], torch.Tensor):
            assert found[key].dtype == expected[key].dtype, key
            assert found[key].equal(expected[key]), key
        else:
            assert found[key] == expected[key], key


def test_a_step_with_a_selection_may_have_fewer_groups(source):
    selection = Selection(keep=lambda group: True, max_groups=9, oversampling=1.0, advice="")
    assert len(source.take(1, 4, selection).trajectories) == 6


@pytest.mark.parametrize(("step", "groups"), [(1, 4), (2, 3)])
def test_a_step_that_was_not_recorded_completely_is_refused(source, step, groups):
    with pytest.raises(UserError, match=r"trains on . groups of 2\. Replay a run"):
        source.take(step, groups)


def test_records_with_rounded_log_probabilities_are_refused(source, tmp_path):
    path = tmp_path / "rollouts" / "step_000001.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({key: value for key, value in row.items() if key != "ordinal"}) + "\n" for row in rows))
    with pytest.raises(UserError, match="rounded log-probabilities"):
        source.take(1, 3)
