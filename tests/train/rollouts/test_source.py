"""What a rollout source provides: complete groups, every prompt once, also with groups that are put back and after a resume."""

import json

import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_train.data.dataloader import BatchedDataLoader
from rl_train.rollouts.source import OnDemandSource, Rollouts

GROUP = 2


class Instant:
    """Plays every rollout at once, instead of an engine: these tests are about which prompts are taken."""

    def __init__(self):
        self.environments = {}

    def collect(self, trajectories, *, stream):
        for row in trajectories:
            row.add_answer("a", torch.tensor([1]), torch.tensor([-1.0]))


def loader_of(rows, *, batch_size=2, shuffle=True):
    datums = [
        {
            "message_log": [{"role": "user", "content": "q", "token_ids": torch.tensor([index])}],
            "length": 1,
            "extra_env_info": {"seen": []},
            "task_name": "t",
            "idx": index,
            "loss_multiplier": 1.0,
            "stop_strings": None,
        }
        for index in range(rows)
    ]
    return BatchedDataLoader(datums, batch_size=batch_size, shuffle=shuffle, seed=3, drop_last=shuffle, collate=list)


def source_of(rows, **loader):
    return OnDemandSource(Instant(), loader_of(rows, **loader), group_size=GROUP)


def groups_of(rollouts):
    """The ordinals of the prompts, after checking that groups are complete and their rows consecutive."""
    ordinals = [row.ordinal for row in rollouts.trajectories]
    assert ordinals[::GROUP] == ordinals[1::GROUP]
    assert rollouts.batch["group_ids"].tolist() == [i // GROUP for i in range(len(ordinals))]
    return ordinals[::GROUP]


def only(rollouts, ordinals):
    rows = [i for i, row in enumerate(rollouts.trajectories) if row.ordinal in ordinals]
    trajectories = [rollouts.trajectories[i] for i in rows]
    return Rollouts(batch=rollouts.batch.select_indices(rows), metrics={}, trajectories=trajectories)


def test_groups_that_are_put_back_come_first_in_the_next_step():
    source = source_of(8, shuffle=False)
    assert groups_of(source.take(1, 4)) == [0, 1, 2, 3]
    source.put_back(only(source.take(1, 3), {5, 6}))
    assert groups_of(source.take(2, 4)) == [5, 6, 7, 8]


def test_a_group_that_was_put_back_has_the_same_prompt_and_record():
    source = source_of(6)
    first = source.take(1, 3)
    source.put_back(first)
    again = source.take(2, 3)
    assert torch.equal(again.batch["input_ids"], first.batch["input_ids"])
    assert again.batch["idx"] == first.batch["idx"]


def test_samples_of_a_prompt_do_not_share_their_metadata():
    source = source_of(4)
    taken = source.take(1, 1)
    first, second = taken.trajectories
    first.metadata["seen"].append("a turn of the first sample")
    assert second.metadata == {"seen": []}
    source.put_back(taken)
    assert source.take(2, 1).trajectories[0].metadata == {"seen": []}


STEPS = st.lists(st.tuples(st.integers(1, 4), st.sets(st.integers(0, 3)), st.booleans()), min_size=1, max_size=12)


@given(steps=STEPS, rows=st.integers(4, 9), shuffle=st.booleans())
def test_no_prompt_is_lost_or_trained_twice_whatever_is_put_back_and_whenever_the_run_is_resumed(steps, rows, shuffle):
    source, trained = source_of(rows, shuffle=shuffle), []
    for step, (groups, unused, resumes) in enumerate(steps, start=1):
        taken = source.take(step, groups)
        ordinals = groups_of(taken)
        assert len(set(ordinals)) == groups
        surplus = {ordinal for i, ordinal in enumerate(ordinals) if i in unused}
        source.put_back(only(taken, surplus))
        trained += [ordinal for ordinal in ordinals if ordinal not in surplus]
        if resumes:
            state = json.loads(json.dumps(source.state_dict()))
            source = source_of(rows, shuffle=shuffle)
            source.load_state_dict(state)
    kept = source.state_dict()["put_back"]
    seen = sorted([*trained, *kept])
    assert len(set(seen)) == len(seen)
    # Whatever was taken is a prefix of the loader's own order.
    assert seen == loader_of(rows, shuffle=shuffle).draw(len(seen))


def test_a_state_without_groups_that_were_put_back_can_be_loaded():
    whole = source_of(6)
    state = whole.state_dict()
    del state["put_back"]
    resumed = source_of(6)
    resumed.load_state_dict(state)
    assert groups_of(resumed.take(1, 2)) == groups_of(whole.take(1, 2))
