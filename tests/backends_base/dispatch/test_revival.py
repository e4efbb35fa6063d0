"""Killed generation workers: no row is lost, no call hangs, and the samples are unchanged."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch
from ray import cloudpickle
from shared_segments import segments_of

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[2] / "core" / "weights"))
import mortal_workers
import tiny_refit_workers
from mortal_workers import FOLDER, MortalWorker, NeverBuiltWorker, ScoringPolicy, StreamingMortalWorker, condemn

from rl_backends_base.distributed_generation import DistributedGeneration
from rl_backends_base.distributed_policy import DistributedPolicy
from rl_backends_base.replica_rows import newest_version
from rl_core.cluster import RayVirtualCluster
from rl_core.config.schema import DeadlineConfig, GenerationConfig, PolicyConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import DeadlineExceededError, WeightSyncError, WorkerDiedError, WorkerError
from rl_core.interfaces.generation import WeightOwner
from rl_train.weight_sync.canary import RefitCanary, make_canary
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer, wait_together
from rl_train.weight_sync.transports import SharedMemoryTransport

cloudpickle.register_pickle_by_value(mortal_workers)
cloudpickle.register_pickle_by_value(tiny_refit_workers)


def lives(pid):
    """Whether the process exists and is not a zombie that Ray has yet to reap."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def cluster(local_ray):
    with RayVirtualCluster([2], use_gpus=False, cpus_per_bundle=1, max_colocated_worker_groups=1) as made:
        yield made


def make_engine(cluster, folder, replicas, max_restarts, worker_class=MortalWorker):
    return DistributedGeneration(
        worker_class=worker_class,
        config=GenerationConfig(backend="tiny", max_new_tokens=8, num_workers=replicas, max_restarts=max_restarts),
        cluster=cluster,
        env_vars={FOLDER: str(folder)},
    )


@pytest.fixture
def engine(cluster, tmp_path):
    """Engines whose workers die on request; at the end none of their processes may remain."""
    made = []

    def make(replicas=2, max_restarts=3, **options):
        made.append(make_engine(cluster, tmp_path, replicas, max_restarts, **options))
        return made[-1]

    yield make
    for one in made:
        pids = one.group.pids()
        one.shutdown()
        assert [pid for pid in pids if lives(pid)] == []


@pytest.fixture
def policy():
    """A policy in this process whose weights are not the initial ones of the engines."""
    made = DistributedPolicy(worker_class=ScoringPolicy, config=PolicyConfig(backend="tiny", model_name="tiny"), cluster=None)
    made.group.run_all("step")
    yield made
    made.shutdown()


def test_the_time_limit_of_the_section_applies_to_the_start_of_the_processes(cluster):
    with pytest.raises(DeadlineExceededError, match="of 'generation'"):
        DistributedGeneration(
            worker_class=NeverBuiltWorker,
            config=GenerationConfig(backend="tiny", max_new_tokens=8, num_workers=1),
            cluster=cluster,
            deadlines=DeadlineConfig(start_s=1.0),
        )


class IdleOwner(WeightOwner):
    """An owner that sends nothing."""

    def provide_weights(self):
        return None


def synchronizer(policy, engine, canary=None):
    return WeightSynchronizer(
        policy,
        engine,
        WeightSender(policy, SharedMemoryTransport, num_receivers=engine.num_workers, wait=wait_together),
        canary=canary,
    )


def prompts(rows=24):
    ids = torch.randint(5, 15, (rows // 2, 4), generator=torch.Generator().manual_seed(1)).repeat_interleave(2, dim=0)
    seeds = torch.arange(rows) * 101
    return BatchedDataDict(input_ids=ids, input_lengths=torch.full((rows,), 4), sample_seeds=seeds)


async def streamed(generation, rows, after=lambda count: None):
    """The outputs of `generate_async` in the order of the rows; calls `after` with the number of outputs so far."""
    found = {}
    async for row, output in generation.generate_async(rows):
        found[row] = output
        after(len(found))
    return BatchedDataDict.from_batches([found[row] for row in range(rows.size)])


def assert_same_rows(found, expected):
    """Tokens depend on a row's seed alone; log-probabilities may differ in their last bits with the other rows of the batch."""
    for key in ("output_ids", "generation_lengths", "unpadded_sequence_lengths", "truncated", "weight_version"):
        assert torch.equal(found[key], expected[key]), key
    torch.testing.assert_close(found["logprobs"], expected["logprobs"], atol=1e-5, rtol=0)


@pytest.mark.slow
def test_rows_of_a_replica_killed_in_the_middle_of_generate_are_sampled_again(engine, tmp_path, caplog):
    two = engine(max_restarts=1)
    undisturbed = two.generate(prompts())
    first, second = two.group.run_all("process")
    condemn(tmp_path, "generate", 1)
    with caplog.at_level(logging.WARNING, "rl_backends_base"):
        found = two.generate(prompts())
    assert_same_rows(found, undisturbed)
    assert two.restarts == 1
    now = two.group.run_all("process")
    assert now[0] == first
    assert now[1] != second
    assert not lives(second)
    said = [record.getMessage() for record in caplog.records]
    printed = "\n".join(said)
    assert f"rank 1 (data=1) of 'generation', host {os.uname().nodename}, pid {second} exited; restarting it" in printed
    assert "12 of 24 rows of the generation call are sampled again" in said
    assert "initial weights, like the others" in printed

    condemn(tmp_path, "generate", 0)
    with pytest.raises(
        WorkerDiedError, match=r"(?s)rank 0 .*host .*pid .*generation\.max_restarts` \(1\) does not allow.*died in generate"
    ):
        two.generate(prompts())


@pytest.mark.full("the test before this one kills one of two replicas; test_revival_in_refit.py kills both in a refit")
def test_all_rows_are_sampled_again_if_all_replicas_are_killed(engine, tmp_path):
    two = engine()
    undisturbed = two.generate(prompts())
    for rank in range(2):
        condemn(tmp_path, "generate", rank)
    assert_same_rows(two.generate(prompts()), undisturbed)
    assert two.restarts == 2


@pytest.mark.full("rows that stream wait for a restarted replica in a later test here, and the first test reaches the limit")
def test_a_streaming_call_on_a_dead_replica_ends_after_a_restart_and_fails_without_one(engine, tmp_path):
    two = engine(max_restarts=1, worker_class=StreamingMortalWorker)
    condemn(tmp_path, "poll", 1)
    assert asyncio.run(streamed(two, prompts(4))).size == 4
    assert two.restarts == 1
    condemn(tmp_path, "poll", 0)
    with pytest.raises(WorkerDiedError, match=r"generation\.max_restarts` \(1\) does not allow another restart"):
        asyncio.run(streamed(two, prompts(4)))


@pytest.mark.slow
def test_a_restarted_single_replica_is_refitted_before_it_samples(engine, policy, tmp_path):
    one = engine(replicas=1)
    untrained = one.generate(prompts())
    sync = synchronizer(policy, one)
    sync.sync()
    undisturbed = one.generate(prompts())
    assert undisturbed["weight_version"].unique().tolist() == [policy.weight_version]
    assert not torch.equal(undisturbed["output_ids"], untrained["output_ids"])

    one.weight_owner = None
    killed = one.group.pids()
    condemn(tmp_path, "generate", 0)
    with pytest.raises(WeightSyncError, match=r"replica 0 was restarted.*creating a `WeightSynchronizer` does that"):
        one.generate(prompts())
    assert one.weight_version == -1
    assert sync.is_stale
    sync.sync(only_if_stale=True)
    assert_same_rows(one.generate(prompts()), undisturbed)

    one.weight_owner = sync
    killed += one.group.pids()
    condemn(tmp_path, "generate", 0)
    assert_same_rows(one.generate(prompts()), undisturbed)
    killed += one.group.pids()
    os.kill(one.group.run_one("process"), signal.SIGKILL)
    one.prepare_for_generation()
    assert_same_rows(one.generate(prompts()), undisturbed)
    assert one.restarts == 3
    sync.close()
    assert segments_of(*killed) == []


def test_a_refit_that_sends_nothing_is_rejected(monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    one = make_engine(None, tmp_path, replicas=1, max_restarts=0)
    one.wait_ready()
    one._without_weights.add(0)  # as after a restart
    one.weight_owner = IdleOwner()
    with pytest.raises(WeightSyncError, match=r"replica 0 .* still has them although IdleOwner\.provide_weights returned"):
        one.generate(prompts())
    one.shutdown()


@pytest.mark.full("core/weights/test_revival_in_refit.py kills replicas while they are verified")
def test_a_replica_that_dies_during_the_canary_is_refitted_again(engine, policy, tmp_path):
    one = engine(replicas=1)
    canary = make_canary(range(5, 15), num_receivers=1, max_length=12, exact=True)
    sync = synchronizer(policy, one, canary=RefitCanary(lambda: canary))
    condemn(tmp_path, "generate", 0)
    assert sync.sync()["refit/canary_error"] < 1e-4
    assert one.restarts == 1
    assert one.weight_version == policy.weight_version
    sync.close()


@pytest.mark.slow
def test_rows_in_progress_on_a_dead_replica_wait_for_its_refit_and_other_rows_do_not(engine, policy, tmp_path):
    two = engine(worker_class=StreamingMortalWorker)
    canary = make_canary(range(5, 15), num_receivers=2, max_length=12, exact=True)
    sync = synchronizer(policy, two, canary=RefitCanary(lambda: canary))
    sync.sync()
    undisturbed = two.generate(prompts())
    refits, killed = two.group.run_all("num_changes"), two.group.pids()[1]
    worker, gate = policy.group.worker, threading.Event()
    gather = worker.iter_weights

    def held_back(names=None):
        gate.wait()
        yield from gather(names)

    worker.iter_weights = held_back
    condemn(tmp_path, "poll", 1)
    # The refit cannot continue before all 12 rows of the other replica have ended.
    found = asyncio.run(streamed(two, prompts(), lambda count: gate.set() if count == 12 else None))
    assert_same_rows(found, undisturbed)
    assert two.restarts == 1
    assert two.weight_version == policy.weight_version
    assert two.group.run_all("num_changes") == [refits[0], 1], "only the new replica is refitted"
    sync.close()
    assert segments_of(killed) == []


@pytest.mark.slow
def test_rows_fail_with_the_reason_if_the_new_replica_cannot_be_refitted(engine, policy, tmp_path):
    one = engine(replicas=1, worker_class=StreamingMortalWorker)
    sync = synchronizer(policy, one)
    sync.sync()
    worker = policy.group.worker
    gather = worker.iter_weights

    def broken(names=None):
        raise OSError("the disk of the policy is gone")

    worker.iter_weights = broken
    condemn(tmp_path, "poll", 0)
    for _ in range(2):
        with pytest.raises(WeightSyncError, match="the disk of the policy is gone"):
            asyncio.run(streamed(one, prompts()))
        with pytest.raises(WeightSyncError, match="the disk of the policy is gone"):
            one.generate(prompts())
    assert one.restarts == 1
    worker.iter_weights = gather
    policy.group.run_all("step")
    assert asyncio.run(streamed(one, prompts()))["weight_version"].unique().tolist() == [policy.weight_version]
    sync.close()


@pytest.mark.slow
def test_answers_of_the_survivor_are_kept_and_all_rows_have_the_policys_version(engine, policy, tmp_path):
    two = engine()
    sync = synchronizer(policy, two)
    sync.sync()
    undisturbed = two.generate(prompts())
    asked = []
    submit = two.group.submit_some

    def counting(method, args_by_rank, **kwargs):
        if method == "generate":
            asked.append(sum(args[0].size for args in args_by_rank.values()))
        return submit(method, args_by_rank, **kwargs)

    two.group.submit_some = counting
    condemn(tmp_path, "generate", 0)
    condemn(tmp_path, "setup", 0)
    assert_same_rows(two.generate(prompts()), undisturbed)
    assert asked == [24, 12]
    assert two.restarts == 2, "one that dies while it starts is one more to replace"
    assert two.weight_version == policy.weight_version
    sync.close()


@pytest.mark.slow
def test_a_replacement_that_loads_something_else_is_refused(engine, tmp_path):
    one = engine(replicas=1)
    one.wait_ready()
    (tmp_path / "other-model").touch()
    os.kill(one.group.pids()[0], signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"rank 0 .* loaded something else: vocab_size was \d+ and is 7"):
        one.generate(prompts())


@pytest.mark.full("the first test here comes to the limit of restarts")
def test_without_restarts_a_dead_replica_fails_the_call(engine, tmp_path):
    one = engine(replicas=1, max_restarts=0)
    one.wait_ready()
    condemn(tmp_path, "generate", 0)
    with pytest.raises(WorkerDiedError, match=r"\(0\) does not allow another restart"):
        one.generate(prompts())
    assert one.restarts == 0


def test_answers_of_older_weights_are_dropped():
    def answer(part, version):
        return part, BatchedDataDict(weight_version=torch.full((len(part),), version))

    old, new = answer([0, 2], 3), answer([1], 4)
    assert newest_version([old, new]) == [new]
    assert newest_version([old]) == [old]
    assert newest_version([]) == []
