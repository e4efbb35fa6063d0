"""A source that samples ahead: groups run during training, the bound holds for every token, and a resume loses no prompt."""

import asyncio
import json
import threading

import pytest
import torch
from scheduled_sources import scheduled_source

from rl_core.data import BatchedDataDict
from rl_core.errors import RLCoreError
from rl_train.data.dataloader import BatchedDataLoader
from rl_train.rollouts.loop import RolloutLoop
from rl_train.rollouts.staleness import DeliveredVersions

PROMPTS, GROUP = 2, 2


class Engine:
    """The weights that sample, and how often an idle step loop served restarted replicas."""

    def __init__(self):
        self.version = 0
        self.served_in = set()

    def prepare_for_generation(self): ...

    def finish_generation(self): ...

    def await_weights(self):
        self.served_in.add(threading.get_ident())


class Collector:
    """Plays each rollout with the weights at its start, once it is released: these tests are about the source."""

    def __init__(self):
        self.environments, self.generation = {}, Engine()
        self.loop = RolloutLoop(threaded=True)
        self.held, self.begun, self.failing = set(), [], set()

    async def play(self, trajectories, *, stream):
        version = self.generation.version
        self.begun += [row.ordinal for row in trajectories if row.sample == 0]
        while any(row.ordinal in self.held for row in trajectories):
            await asyncio.sleep(0.005)
        for row in trajectories:
            row.add_answer("a", torch.tensor([1]), torch.tensor([-1.0]), weight_version=version)
            if row.ordinal in self.failing:
                row.scored = False


@pytest.fixture
def collector():
    made = Collector()
    yield made
    made.loop.close()


def loader(rows=64):
    datums = [
        {
            "message_log": [{"role": "user", "content": "q", "token_ids": torch.tensor([index])}],
            "length": 1,
            "extra_env_info": None,
            "task_name": "t",
            "idx": index,
            "loss_multiplier": 1.0,
        }
        for index in range(rows)
    ]
    return BatchedDataLoader(datums, batch_size=PROMPTS, shuffle=False, collate=list)


def source_of(collector, k, *, ahead=None, **options):
    return scheduled_source(
        collector,
        loader(),
        weight_version=lambda: collector.generation.version,
        group_size=GROUP,
        demand=PROMPTS,
        max_staleness=k,
        ahead=k if ahead is None else ahead,
        **options,
    )


def step(source, collector, number):
    """The ordinals that a step trains, and its metrics; the engine then has the weights of the next step."""
    taken = source.take(number, PROMPTS)
    collector.generation.version += 10  # a step takes several optimizer steps
    return sorted({row.ordinal for row in taken.trajectories}), taken.metrics


def test_groups_of_later_steps_begin_before_a_step_trains(collector):
    source = source_of(collector, 1)
    trained, metrics = step(source, collector, 1)
    assert len(trained) == PROMPTS
    source._collector.loop.run(asyncio.sleep(0))
    assert sorted(collector.begun) == [0, 1, 2, 3]
    assert metrics["rollout/in_flight"] + metrics["rollout/ready"] == PROMPTS * GROUP
    assert metrics["staleness/steps_max"] == 0.0


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_slow_group_is_trained_within_the_bound_although_others_end_first(collector, k):
    source, slow = source_of(collector, k), 1
    collector.held.add(slow)
    trained = {}
    for number in range(1, k + 1):
        ordinals, metrics = step(source, collector, number)
        trained |= dict.fromkeys(ordinals, number)
    assert slow not in trained
    threading.Timer(0.1, collector.held.clear).start()  # step k + 1 must wait for it
    ordinals, metrics = step(source, collector, k + 1)
    assert slow in ordinals
    assert metrics["staleness/steps_max"] == k
    assert metrics["rollout/wait_s"] > 0.05


def test_a_thread_that_waits_for_rollouts_gives_restarted_replicas_their_weights(collector):
    source = source_of(collector, 1)
    collector.held |= {0, 1, 2, 3}
    threading.Timer(0.3, collector.held.clear).start()
    step(source, collector, 1)
    assert collector.generation.served_in == {threading.get_ident()}


def test_a_token_of_weights_beyond_the_bound_is_an_error():
    current = iter([0, 10, 10, 20])
    delivered = DeliveredVersions(1, lambda: next(current))
    for number in (1, 2, 3, 4):  # the third step did not change the weights
        delivered.record(number)
    mask = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
    within = BatchedDataDict(token_mask=mask, token_versions=torch.tensor([[-1, 10, 20], [-1, 20, -1]]))
    metrics = {"staleness/steps_mean": 0.5, "staleness/steps_max": 1.0, "rollout/mixed_version_frac": 0.5}
    assert delivered.staleness(within, 4) == metrics
    beyond = BatchedDataDict(token_mask=mask, token_versions=torch.tensor([[-1, 0, 20], [-1, 20, -1]]))
    with pytest.raises(RLCoreError, match=r"weight version 0 sampled, but rollout.max_staleness \(1\) allows only"):
        delivered.staleness(beyond, 4)


def test_a_group_with_too_few_scored_rows_is_replaced_while_others_continue(collector):
    collector.failing.add(1)
    source = source_of(collector, 1)
    first, _ = step(source, collector, 1)
    second, _ = step(source, collector, 2)
    third, _ = step(source, collector, 3)
    assert 1 not in [*first, *second, *third]
    assert len({*first, *second, *third}) == 3 * PROMPTS


@pytest.mark.parametrize("k", [0, 1, 2])
def test_every_prompt_is_trained_once_although_the_run_is_killed_after_every_step(collector, k):
    source, trained = source_of(collector, k), []
    for number in range(1, 7):
        trained += step(source, collector, number)[0]
        state = json.loads(json.dumps(source.state_dict()))
        source = source_of(collector, k)
        source.load_state_dict(state)
    assert len(set(trained)) == len(trained) == 6 * PROMPTS
    rest = state["again"]
    assert not set(rest) & set(trained)
    assert sorted([*trained, *rest]) == list(range(len(trained) + len(rest)))


def test_an_error_of_a_rollout_ends_the_run(collector):
    source = source_of(collector, 1)

    async def fail(trajectories, *, stream):
        raise RLCoreError("the engine is gone")

    collector.play = fail
    with pytest.raises(RLCoreError, match="the engine is gone"):
        source.take(1, PROMPTS)
