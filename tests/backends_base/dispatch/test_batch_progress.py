"""Progress of a `generate` call, read in another thread while the workers are busy."""

from __future__ import annotations

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from ray import cloudpickle

sys.path.insert(0, str(Path(__file__).parent))
import gated_workers
from gated_workers import TOKENS, ReportingWorker, SilentWorker

from rl_backends_base.distributed_generation import DistributedGeneration
from rl_core.cluster import RayVirtualCluster
from rl_core.cluster.actor_host import read_progress
from rl_core.config.schema import GenerationConfig
from rl_core.data.batched_data_dict import BatchedDataDict

pytestmark = pytest.mark.slow

cloudpickle.register_pickle_by_value(gated_workers)


@pytest.fixture(scope="module")
def cluster(local_ray):
    with RayVirtualCluster([2], use_gpus=False, cpus_per_bundle=1, max_colocated_worker_groups=1) as made:
        yield made


@pytest.fixture
def engine_for(tmp_path):
    """Makes an engine whose workers wait for files in `tmp_path`."""
    made = []

    def make(worker_class=ReportingWorker, cluster=None):
        config = GenerationConfig(backend="gated", model_name=str(tmp_path), max_new_tokens=8)
        made.append(DistributedGeneration(worker_class=worker_class, config=config, cluster=cluster))
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()


def rows_of(*first_tokens):
    ids = torch.tensor([[token, 5] for token in first_tokens])
    return BatchedDataDict(input_ids=ids, input_lengths=torch.full((len(ids),), 2))


def wait_for_progress(engine, expected):
    until = time.monotonic() + 300
    while (progress := engine.batch_progress()) != expected:
        assert time.monotonic() < until, f"{progress} instead of {expected}"
        time.sleep(0.01)


def check_call(engine, folder, *rows):
    """Sample these rows, and see the number of those that have ended from 0 to all."""
    with ThreadPoolExecutor(1) as pool:
        output = pool.submit(engine.generate, rows_of(*rows))
        wait_for_progress(engine, (0, 0))
        (folder / str(rows[0])).touch()  # the first row of a replica, whatever the others are
        wait_for_progress(engine, (1, TOKENS))
        for row in rows[1:]:
            (folder / str(row)).touch()
        assert output.result(300)["generation_lengths"].tolist() == [TOKENS] * len(rows)
        wait_for_progress(engine, (len(rows), len(rows) * TOKENS))


def test_ended_rows_and_tokens_are_counted_while_a_batch_is_sampled(engine_for, tmp_path):
    engine = engine_for()
    check_call(engine, tmp_path, 10, 11, 12, 13)
    check_call(engine, tmp_path, 20, 21, 22, 23)


def test_an_engine_whose_worker_reports_nothing_has_no_progress(engine_for, tmp_path):
    engine = engine_for(SilentWorker)
    (tmp_path / "10").touch()
    engine.generate(rows_of(10))
    assert engine.batch_progress() is None


@pytest.mark.ray
def test_the_rows_of_all_replicas_are_counted_and_nothing_is_left_in_the_store_of_ray(engine_for, cluster, tmp_path):
    engine = engine_for(cluster=cluster)
    check_call(engine, tmp_path, 10, 11, 12, 13)
    check_call(engine, tmp_path, 20, 21, 22, 23)
    check_call(engine, tmp_path, 30)  # without the earlier rows of the replica that has none
    tasks = engine.group._sampling
    assert read_progress(tasks) == (1, TOKENS)
    engine.shutdown()
    assert read_progress(tasks) is None


@pytest.mark.ray
def test_rows_that_are_sampled_again_after_a_death_are_not_counted_twice(engine_for, cluster, tmp_path):
    engine, seen = engine_for(cluster=cluster), set()
    with ThreadPoolExecutor(1) as pool:
        output = pool.submit(engine.generate, rows_of(10, 11, 12, 13))
        (tmp_path / "10").touch()
        wait_for_progress(engine, (1, TOKENS))
        os.kill(engine.group.pids()[1], signal.SIGKILL)
        for row in (11, 12, 13):
            (tmp_path / str(row)).touch()
        while not output.done():
            seen.add(engine.batch_progress())
            time.sleep(0.01)
        assert output.result()["generation_lengths"].tolist() == [TOKENS] * 4
    assert engine.restarts == 1
    assert max(rows for rows, _ in seen - {None}) <= 4
