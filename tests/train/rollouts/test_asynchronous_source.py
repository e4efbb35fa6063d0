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
from rl_train.rollouts.collect import RolloutLoop
from rl_train.rollouts.schedule import DeliveredVersions
from rl_train.rollouts.trajectory import to_batch

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
        self.held, self.begun, self.failing, self.together = set(), [], set(), []

    async def play(self, trajectories, *, stream):
        version = self.generation.version
        self.together.append(len(trajectories) // GROUP)
        self.begun += [row.ordinal for row in trajectories if row.sample == 0]
        while any(row.ordinal in self.held for row in trajectories):
            await asyncio.sleep(0.005)
        for row in trajectories:
            exact = torch.tensor([-1.0 / (3 + row.ordinal), -1e-7])
            row.add_answer("a", torch.tensor([1, 2]), exact, weight_version=version, token_versions=torch.full((2,), version))
            row.scored = row.ordinal not in self.failing
            row.finished = True


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
    collector.loop.run(asyncio.sleep(0))  # every group that has begun has noted its weights
    if source._schedule.exact:
        source.end_rollouts()  # as the synchronizer does before a refit
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


def test_an_exact_batch_has_the_next_prompts_with_the_weights_of_k_steps_before(collector):
    source = source_of(collector, 2, exact=True)
    collector.failing.add(4)  # of batch 3, which is sampled with the first weights
    for number in range(1, 7):
        trained, metrics = step(source, collector, number)
        assert metrics["staleness/steps_mean"] == metrics["staleness/steps_max"] == min(number - 1, 2)
        if number == 1:
            assert collector.begun == [0, 1, 2, 3, 4, 5, 6], "the failed group is replaced before the weights change"
            first = trained
        elif number == 3:
            assert trained == [5, 6]
    assert first == [0, 1]
    assert trained == [11, 12]
    assert collector.together[:3] == [2, 2, 2], "the engine samples the batches of a synchronous run"


def test_an_exact_batch_with_newer_weights_than_those_with_which_it_began_is_an_error(collector):
    source = source_of(collector, 1, exact=True)
    step(source, collector, 1)
    source._rows[2][1].message_log[-1]["token_versions"] += 10
    with pytest.raises(RLCoreError, match="began with weight version 0 have tokens of version 10"):
        step(source, collector, 2)


def test_a_checkpoint_of_an_exact_run_waits_for_rollouts_in_progress(collector, tmp_path):
    source = source_of(collector, 1, exact=True)
    collector.held |= {2, 3}
    source.take(1, PROMPTS)
    threading.Timer(0.01, collector.held.clear).start()
    resumed = killed_and_resumed(source, collector, 1, tmp_path, exact=True)
    assert sorted(resumed._rows) == [2, 3]
    _, metrics = step(source, collector, 2)
    assert metrics["rollout/ending_s"] > 0


def test_rollouts_end_before_a_refit_and_those_that_are_replaced_begin_after_it(collector):
    source = source_of(collector, 1)
    collector.held |= {2, 3}
    collector.failing.add(3)
    source.take(1, PROMPTS)
    threading.Timer(0.01, collector.held.clear).start()
    source.end_rollouts()  # as the synchronizer does if the engine does not continue rows over a refit
    assert all(future.done() for future in source._playing)
    assert sorted(collector.begun) == [0, 1, 2, 3]
    collector.generation.version += 10
    trained, metrics = step(source, collector, 2)
    assert trained[0] == 2
    assert 3 not in trained
    assert metrics["rollout/ending_s"] > 0
    assert metrics["rollout/mixed_version_frac"] == 0.0


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


def killed_and_resumed(source, collector, k, folder, **options):
    """The source of a run that is resumed from its last checkpoint."""
    state = json.loads(json.dumps(source.state_dict()))
    source.save_files(folder)
    resumed = source_of(collector, k, **options)
    resumed.load_state_dict(state)
    resumed.load_files(folder)
    return resumed


@pytest.mark.parametrize("k", [0, 1, 2])
def test_every_prompt_is_trained_once_although_the_run_is_killed_after_every_step(collector, tmp_path, k):
    source, trained = source_of(collector, k), []
    for number in range(1, 7):
        trained += step(source, collector, number)[0]
        state = source.state_dict()
        source = killed_and_resumed(source, collector, k, tmp_path / str(number))
    assert len(set(trained)) == len(trained) == 6 * PROMPTS
    rest = state["again"]
    assert not set(rest) & set(trained)
    assert sorted([*trained, *rest]) == list(range(len(trained) + len(rest)))


def wait_until_ended(source):
    source._collector.loop.wait(lambda: all(future.done() for future in source._playing))


def rows_by_ordinal(source):
    """What will be trained of each group that is alive."""
    batches = {ordinal: to_batch(rows) for ordinal, rows in source._rows.items()}
    keys = ("input_ids", "generation_logprobs", "token_versions", "rewards")
    return {ordinal: [batch[key].tolist() for key in keys] for ordinal, batch in batches.items()}


@pytest.mark.parametrize("accepted", [True, False], ids=["counted before", "counted after"])
def test_finished_groups_are_restored_with_exact_log_probabilities_and_versions(collector, tmp_path, accepted):
    source, slow = source_of(collector, 2), 3
    collector.held.add(slow)
    step(source, collector, 1)
    collector.held.add(7)  # of those that begin in step 2
    step(source, collector, 2)
    source._collector.loop.wait(lambda: sum(not future.done() for future in source._playing) == 2)
    if accepted and any(future.done() for future in source._playing):  # otherwise step 2 has counted them
        source._await_groups()
    before = rows_by_ordinal(source)
    collector.begun.clear()
    resumed = killed_and_resumed(source, collector, 2, tmp_path)
    assert rows_by_ordinal(resumed) == {ordinal: rows for ordinal, rows in before.items() if ordinal not in (slow, 7)}
    collector.held.clear()
    trained, metrics = step(resumed, collector, 3)
    assert metrics["staleness/steps_max"] == 2.0, "a restored group keeps its age"
    assert not set(trained) & set(collector.begun), "restored groups are not sampled again"
    wait_until_ended(resumed)
    assert {slow, 7} <= set(collector.begun)


def test_finished_groups_are_sampled_again_with_other_settings_or_metadata_that_are_not_json(collector, tmp_path, caplog):
    source = source_of(collector, 1)
    step(source, collector, 1)
    wait_until_ended(source)
    shorter = killed_and_resumed(source, collector, 1, tmp_path / "a", ahead=0)
    assert shorter._rows == {}
    assert shorter.state_dict()["again"] == [2, 3]
    source._rows[2][0].metadata = {"a": (1, 2)}  # a tuple would come back as a list
    resumed = killed_and_resumed(source, collector, 1, tmp_path / "b")
    assert list(resumed._rows) == [3]
    assert "The finished rollouts of 1 of 2 groups are not in the checkpoint" in caplog.text


def test_an_error_of_a_rollout_ends_the_run(collector):
    source = source_of(collector, 1)

    async def fail(trajectories, *, stream):
        raise RLCoreError("the engine is gone")

    collector.play = fail
    with pytest.raises(RLCoreError, match="the engine is gone"):
        source.take(1, PROMPTS)
