"""Which replica samples a row: that of its session or of its prompt, else the least loaded one."""

import torch

from rl_backends_base.replica_rows import ReplicaAffinity, prompt_keys, split_by_prompt
from rl_core.data.batched_data_dict import BatchedDataDict


def rows(*tokens, prompt_id=None):
    batch = BatchedDataDict({"input_ids": torch.tensor([[token, 0] for token in tokens])})
    batch["input_lengths"] = torch.ones(len(tokens), dtype=torch.int64)
    if prompt_id is not None:
        batch["prompt_id"] = torch.tensor(prompt_id)
    return batch


def test_without_prompt_ids_rows_with_equal_tokens_are_one_prompt():
    keys = prompt_keys(rows(5, 6, 5))
    assert keys[0] == keys[2] != keys[1]


def test_with_prompt_ids_equal_prompts_of_different_groups_are_spread():
    # A game whose prompts all have the same text must not run on one replica only.
    batch = rows(5, 5, 5, 5, prompt_id=[0, 0, 1, 1])
    assert split_by_prompt(prompt_keys(batch), 2) == [[0, 1], [2, 3]]
    affinity = ReplicaAffinity(2)
    assert [affinity.assign(str(row), batch.slice(row, row + 1)) for row in range(4)] == [0, 0, 1, 1]
    assert affinity.load == [2, 2]


def test_the_largest_groups_are_placed_first_and_empty_parts_are_left_out():
    assert split_by_prompt([0, 1, 1, 2, 2, 2], 2) == [[3, 4, 5], [1, 2, 0]]
    assert split_by_prompt([7, 7], 3) == [[0, 1]]


def test_a_replica_without_rows_in_progress_is_forgotten():
    affinity = ReplicaAffinity(2)
    affinity.assign("busy", rows(1))
    assert affinity.assign("first", rows(5)) == 1
    affinity.release("first")
    affinity.release("busy")
    assert affinity.load == [0, 0]
    assert affinity.assign("second", rows(5)) == 0


def test_an_excluded_replica_gets_rows_only_if_all_are_excluded():
    affinity, turn = ReplicaAffinity(2), BatchedDataDict({**rows(1), "session_ids": ["s"]})
    first = affinity.assign("turn 1", turn)
    affinity.release("turn 1")
    affinity.excluded.add(first)
    assert [affinity.assign(f"row {number}", rows(number)) for number in range(3)] == [1, 1, 1]
    assert affinity.assign("turn 2", turn) == 1
    affinity.excluded.add(1)
    assert affinity.assign("last", rows(7)) == 0
