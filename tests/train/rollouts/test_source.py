"""What a rollout source provides: complete groups, every prompt once, also after a resume and with groups begun ahead."""

import json

import torch
from hypothesis import given
from hypothesis import strategies as st
from scheduled_sources import scheduled_source

from rl_train.data.dataloader import BatchedDataLoader
from rl_train.rollouts.collect import RolloutLoop

GROUP = 2


class Idle:
    """The part of an engine that a source calls."""

    def prepare_for_generation(self): ...

    def finish_generation(self): ...

    def await_weights(self): ...


class Instant:
    """Plays every rollout at once, instead of an engine: these tests are about which prompts are taken."""

    def __init__(self, **loop):
        self.environments, self.generation, self.loop = {}, Idle(), RolloutLoop(**loop)

    async def play(self, trajectories, *, stream):
        for row in trajectories:
            row.add_answer("a", torch.tensor([1]), torch.tensor([-1.0]), weight_version=3)


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
    return scheduled_source(Instant(), loader_of(rows, **loader), group_size=GROUP)


def groups_of(rollouts):
    """The ordinals of the prompts, after checking that groups are complete and their rows consecutive."""
    ordinals = [row.ordinal for row in rollouts.trajectories]
    assert ordinals[::GROUP] == ordinals[1::GROUP]
    assert rollouts.batch["group_ids"].tolist() == [i // GROUP for i in range(len(ordinals))]
    return ordinals[::GROUP]


def test_samples_of_a_prompt_do_not_share_their_metadata():
    source = source_of(4)
    taken = source.take(1, 1)
    first, second = taken.trajectories
    first.metadata["seen"].append("a turn of the first sample")
    assert second.metadata == {"seen": []}


STEPS = st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=12)


@given(steps=STEPS, rows=st.integers(4, 9), shuffle=st.booleans())
def test_no_prompt_is_lost_or_trained_twice_whenever_the_run_is_resumed(steps, rows, shuffle):
    source, trained = source_of(rows, shuffle=shuffle), []
    for step, (groups, resumes) in enumerate(steps, start=1):
        ordinals = groups_of(source.take(step, groups))
        assert len(set(ordinals)) == groups
        trained += ordinals
        if resumes:
            state = json.loads(json.dumps(source.state_dict()))
            source = source_of(rows, shuffle=shuffle)
            source.load_state_dict(state)
    assert trained == loader_of(rows, shuffle=shuffle).draw(len(trained))


def test_groups_that_an_older_version_put_back_come_first():
    state = source_of(6).state_dict()
    del state["again"]
    resumed = source_of(6, shuffle=False)
    resumed.load_state_dict(state | {"put_back": [1, 3], "prompts": {**resumed.state_dict()["prompts"], "cursor": 4}})
    assert groups_of(resumed.take(1, 3)) == [1, 3, 4]
