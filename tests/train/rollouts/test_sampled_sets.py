"""Sets of kept tokens in rollouts: turns, segments, batches and checkpoints keep them with their tokens."""

import pytest
import torch

from rl_core.data.generation_io import SETS, SampledSets, kept_tokens
from rl_core.errors import UserError
from rl_train.rollouts import trajectory
from rl_train.rollouts.records import SavedGroup, load_groups, save_groups
from rl_train.rollouts.trajectory import Trajectory, join_segments, optimizer_batches, split_segments, to_batch


def sets_of(tokens):
    """The set of each token: itself, and as many others as its id."""
    words = [torch.arange(token, 2 * token + 1, dtype=torch.int32) for token in tokens.tolist()]
    return SampledSets(counts=torch.tensor([len(each) for each in words], dtype=torch.int32), words=torch.cat(words))


def rollout(number, *, rewritten, sets=True):
    """Two turns of three tokens."""
    prompt = [{"role": "user", "content": "q", "token_ids": torch.tensor([3, 4])}]
    numbers = {"group_id": 0, "index": 0, "ordinal": 0, "sample": number}
    row = Trajectory(message_log=prompt, metadata={}, task_name="t", **numbers)
    for turn in range(2):
        tokens = torch.tensor([5 + number, 6 + turn, 9])
        row.add_answer("a", tokens, torch.zeros(3), weight_version=1, sampled_sets=sets_of(tokens) if sets else None)
        more = {"role": "environment", "content": "o"}
        if turn == 0 and rewritten:
            row.start_segment(more, torch.tensor([3, 6, 7, 8]))
        elif turn == 0:
            row.add_observation(more, torch.tensor([6, 7]))
    row.done = True
    return row


def check(batch):
    """Sampled tokens have their own sets, and other tokens none."""
    for ids, length, mask, sets in zip(
        *(batch[key] for key in ("input_ids", "input_lengths", "token_mask", SETS)), strict=True
    ):
        assert len(sets["counts"]) >= int(length)
        position, kept = kept_tokens(sets)
        for at in range(int(length)):
            expected = range(int(ids[at]), 2 * int(ids[at]) + 1) if mask[at] else ()
            assert sorted(kept[position == at].tolist()) == [*expected]


def test_turns_and_segments_keep_the_sets_of_their_tokens():
    batch = to_batch([rollout(0, rewritten=False), rollout(1, rewritten=True), rollout(2, rewritten=False)])
    assert batch.size == 4
    check(batch)
    again = split_segments(join_segments(batch).select_indices([2, 1, 0]))
    assert again.size == 4
    check(again)
    filled, per_step = optimizer_batches(batch, 2, multiple_of=2)
    assert (filled.size, per_step) == (8, 4)
    check(filled.select_indices(filled["sample_mask"] > 0))


def test_batches_without_sets_have_no_column():
    assert SETS not in to_batch([rollout(0, rewritten=False, sets=False)])


def test_a_checkpoint_has_the_sets_of_finished_groups(tmp_path):
    rows = [rollout(0, rewritten=True), rollout(1, rewritten=False)]
    save_groups(tmp_path, [SavedGroup(ordinal=0, began=1, accepted=False, rows=rows)], {})
    [group] = load_groups(tmp_path, {})
    found = to_batch(group.rows)
    check(found)
    for one, other in zip(found[SETS], to_batch(rows)[SETS], strict=True):
        assert torch.equal(one["counts"], other["counts"])
        assert torch.equal(one["words"], other["words"])


def test_a_step_whose_sets_are_too_large_is_refused_with_the_key(monkeypatch):
    monkeypatch.setattr(trajectory, "MOST_SET_BYTES", 300)
    to_batch([rollout(0, rewritten=False)])
    with pytest.raises(
        UserError, match=r"kept take 0\.5 KiB in this step, more than the 0\.3 KiB .* Lower policy.generation.top_p"
    ):
        to_batch([rollout(0, rewritten=False), rollout(1, rewritten=False)])
