from __future__ import annotations

import subprocess
import sys

import pytest
from cluster_workers import ContextFree, Scorer, Worker

from rl_core.cluster import InProcessWorkerGroup, NamedSharding
from rl_core.errors import UserError, WorkerError, frames_of
from rl_train.pools.pool import InProcessPool
from rl_train.weight_sync.synchronizer import wait_together


def test_the_single_worker_supports_every_kind_of_call():
    with InProcessWorkerGroup(Worker, worker_kwargs={"base": 10}) as group:
        assert group.world_size == 1
        assert group.run_all("add", 1, y=2) == [13]
        assert group.run_one("add", 1) == 11
        assert group.submit_some("add", {0: (1, 2)}).result() == [13]
        assert group.run_sharded("seen", ["shard"], "!") == [(0, "shard", "!")]
        assert wait_together([group.submit_all("add", 1), group.submit_one("add", 2)], 5.0) == [[11], 12]
        assert group.run_one("whoami").run_in_process


def test_arguments_and_results_are_passed_by_reference():
    batch = object()
    with InProcessWorkerGroup(Worker) as group:
        assert group.run_one("seen", batch)[1] is batch


def test_the_last_frame_of_an_error_is_its_own_and_not_that_of_its_cause():
    def fail():
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer") from error

    with pytest.raises(ValueError, match="outer") as raised:
        fail()
    (_, inner), *_, (_, outer) = frames_of(raised.value)
    assert inner < outer


def test_an_error_keeps_the_frames_of_the_worker_for_a_debugger():
    with InProcessWorkerGroup(Worker) as group, pytest.raises(WorkerError, match=r"rank 0 .*raise_on\(\)") as caught:
        group.run_one("raise_on", 0, KeyError("k"))
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__cause__.__traceback__ is not None


def test_a_worker_that_calls_exit_fails_like_one_that_raises_and_its_line_is_named():
    with InProcessWorkerGroup(Worker) as group, pytest.raises(WorkerError, match=r"SystemExit: 3 \(.*cluster_workers.py:\d+\)"):
        group.run_one("raise_on", 0, SystemExit(3))


def test_a_restart_resets_state_and_a_group_after_shutdown_raises():
    group = InProcessWorkerGroup(Worker)
    group.run_one("add", 1)
    group.restart(0)
    assert group.run_one("count") == 0
    group.shutdown()
    assert group.workers_alive() == [False]
    with pytest.raises(UserError, match="shut down"):
        group.run_one("count")


def test_more_than_one_rank_is_refused():
    with pytest.raises(UserError, match="one worker"):
        InProcessWorkerGroup(ContextFree, sharding=NamedSharding.grid(data=2))


def test_the_in_process_pool_runs_a_call_before_submit_returns():
    with InProcessPool(Scorer) as pool:
        assert [pool.submit("square", x).result(0) for x in (3, 1, 2)] == [9, 1, 4]


def test_the_in_process_group_needs_no_ray():
    code = (
        "import sys; from rl_core.cluster import InProcessWorkerGroup, NamedSharding, WorkerContext; "
        "print(sorted({'ray', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
