from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from cluster_workers import Scorer, lives, wait_until

from rl_core.cluster import Deadlines, RayVirtualCluster, daemons
from rl_core.cluster.remote_actor import ActorCall
from rl_core.errors import DeadlineExceededError, RayDiedError, UserError, WorkerDiedError, WorkerError
from rl_train.pools.actor_pool import ActorPool
from rl_train.pools.pool import InProcessPool

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.fixture(scope="module")
def pool(local_ray, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pool")
    with ActorPool(None, Scorer, 2, {"folder": str(folder)}, deadline_s=60.0, name="scorers") as made:
        yield made


def run_all(pool, method, calls):
    """The results of several calls, each with one argument, in their order."""
    return [call.result(60) for call in [pool.submit(method, argument) for argument in calls]]


@pytest.mark.slow
def test_each_call_gets_its_own_result(pool):
    assert run_all(pool, "square", range(20)) == [x * x for x in range(20)]


def test_calls_are_distributed_over_all_actors(pool):
    calls = [pool.submit("pid") for _ in range(8)]
    assert sorted({call.result(60) for call in calls}) == sorted(pool.pids())


def test_an_actor_killed_in_the_middle_of_a_call_is_replaced_and_only_its_call_fails(pool):
    before = set(pool.pids())
    log = pool_folder(pool) / "calls"

    def made():
        return [tuple(map(int, line.split())) for line in log.read_text().splitlines()] if log.exists() else []

    calls = [pool.submit("square_or_wait_for_death", x) for x in (1, 2, 3, 4)]
    wait_until(lambda: any(x == 1 for x, _ in made()))
    killed = next(pid for x, pid in made() if x == 1)
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"pool 'scorers': square_or_wait_for_death\(\) failed"):
        calls[0].result(60)
    assert [call.result(60) for call in calls[1:]] == [4, 9, 16]
    assert wait_until(lambda: before - set(pool.pids()) == {killed})
    assert sorted(x for x, _ in made()) == [1, 2, 3, 4]
    assert run_all(pool, "square", [5, 6]) == [25, 36]


def pool_folder(pool) -> Path:
    return Path(pool.submit("where").result(60))


def test_a_call_that_kills_its_actor_fails_and_the_pool_continues(pool):
    with pytest.raises(WorkerDiedError, match=r"pool 'scorers': die_always\(\) failed"):
        pool.submit("die_always", 2).result(60)
    assert run_all(pool, "square", [5, 6]) == [25, 36]


def test_a_call_past_its_deadline_fails_with_its_stack_and_its_actor_is_replaced(local_ray):
    with ActorPool(None, Scorer, 1, deadline_s=2.0, deadlines=Deadlines(stack_s=120.0), name="hanging") as pool:
        with pytest.raises(DeadlineExceededError, match=r"(?s)pool 'hanging': hang_always\(\) failed.*loop_that_never_ends"):
            pool.submit("hang_always", 2).result(240)
        assert pool.submit("square", 3, deadline_s=60.0).result(60) == 9


def test_an_error_in_a_call_is_not_retried_and_names_the_actor(pool):
    with pytest.raises(WorkerError, match=r"(?s)actor \d of pool 'scorers'.*divide\(\).*ZeroDivisionError") as caught:
        pool.submit("divide", 0).result(60)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert run_all(pool, "divide", [1, 2]) == [1.0, 0.5]


def test_submitted_calls_do_not_wait_for_a_slow_one(pool):
    slow = pool.submit("wait_for", "gate")
    assert [pool.submit("square", x).result(60) for x in range(5)] == [0, 1, 4, 9, 16]
    assert run_all(pool, "square", [5, 6]) == [25, 36]
    assert not slow.done()
    (pool_folder(pool) / "gate").touch()
    assert slow.result(60) == "gate"


@pytest.mark.slow
def test_a_pool_continues_without_an_actor_whose_replacement_cannot_be_built(local_ray, tmp_path, caplog):
    with ActorPool(None, Scorer, 2, {"folder": str(tmp_path)}, max_restarts=0, name="broken") as pool:
        first, second = pool.pids()
        slow = pool.submit("wait_for", "gate")
        wait_until(lambda: slow.running())
        (tmp_path / "broken").touch()
        with pytest.raises(WorkerDiedError):
            pool.submit("die_once", 3, "once").result(60)
        waiting = pool.submit("square", 3)  # while the other actor is busy
        assert wait_until(lambda: "continues with 1 of 2 actors" in caplog.text)
        assert "the model file is gone" in caplog.text
        assert len(pool.actors) == 1
        (tmp_path / "gate").touch()
        assert slow.result(60) == "gate"
        assert waiting.result(60) == 9
        assert (tmp_path / "starts").read_text() == "."
        # Without any actor, calls fail with the reason, and the pool recovers when the cause is gone.
        with pytest.raises(WorkerDiedError):
            pool.submit("die_once", 3, "twice").result(60)
        with pytest.raises(WorkerError, match="the model file is gone"):
            pool.submit("square", 3).result(60)
        assert wait_until(lambda: pool.actors == [])
        (tmp_path / "broken").unlink()
        assert pool.submit("square", 3).result(60) == 9
        assert len(pool.actors) == 2
        assert not {first, second} & set(pool.pids())


def test_an_argument_that_cannot_be_pickled_fails_only_its_own_call(pool):
    good, bad = pool.submit("square", 3), pool.submit("square", threading.Lock())
    with pytest.raises(UserError, match=r"(?s)arguments of square\(\) cannot be sent to actor \d of pool 'scorers'.*lock"):
        bad.result(60)
    assert good.result(60) == 9
    assert pool.submit("square", 4).result(60) == 16


def test_a_call_whose_outcome_arrives_while_ray_dies_ends_with_that_reason(local_ray, monkeypatch):
    """Ray's death is raised by the pool while it reads the outcome; no call may be left without an answer."""

    def died(_):
        raise RayDiedError("the raylet died")

    pool = ActorPool(None, Scorer, 1)
    monkeypatch.setattr(ActorCall, "result", died)
    with pytest.raises(RayDiedError, match="the raylet died"):
        pool.submit("square", 3).result(60)
    monkeypatch.undo()
    pool.shutdown()


def test_a_dead_daemon_that_only_the_thread_of_a_pool_detects_is_not_noticed(monkeypatch):
    watch = SimpleNamespace(death="the raylet died", noticed=threading.Event())
    monkeypatch.setattr(daemons, "_watch", watch)

    def pool_thread():
        daemons.mark_background_thread()
        assert daemons.is_dead()

    thread = threading.Thread(target=pool_thread)
    thread.start()
    thread.join()
    assert not watch.noticed.is_set()
    assert daemons.is_dead()
    assert watch.noticed.is_set()


@pytest.mark.slow
def test_an_actor_runs_several_calls_at_once_and_those_next_to_a_late_one_are_not_counted_as_failed(local_ray, tmp_path):
    options = {"max_concurrency": 2, "max_restarts": 0, "deadlines": Deadlines(stack_s=120.0)}
    with ActorPool(None, Scorer, 1, {"folder": str(tmp_path)}, **options) as pool:
        before = pool.pids()
        slow = pool.submit("wait_for", "gate")
        assert pool.submit("square", 3).result(60) == 9
        late = pool.submit("hang_always", 2, deadline_s=3.0)
        with pytest.raises(DeadlineExceededError, match=r"(?s)hang_always\(\) failed.*loop_that_never_ends"):
            late.result(60)
        (tmp_path / "gate").touch()
        assert slow.result(60) == "gate"
        assert pool.pids() != before


def test_shutting_a_pool_down_ends_the_calls_that_run_or_wait(local_ray, tmp_path):
    pool = ActorPool(None, Scorer, 1, {"folder": str(tmp_path)}, deadlines=Deadlines(stop_s=1.0))
    calls = [pool.submit("hang_always", 2), pool.submit("square", 3)]
    pool.shutdown()
    for call in calls:
        with pytest.raises(UserError, match="shut down before the call ended"):
            call.result(60)


def test_calls_of_an_in_process_pool_run_in_threads_only_if_asked(tmp_path):
    with InProcessPool(Scorer, {"folder": str(tmp_path)}) as pool:
        assert pool.submit("square", 3).result(0) == 9
        assert isinstance(pool.submit("divide", 0).exception(0).__cause__, ZeroDivisionError)
    with InProcessPool(Scorer, {"folder": str(tmp_path)}, max_concurrency=2) as pool:
        slow = pool.submit("wait_for", "gate")
        assert pool.submit("square", 3).result(60) == 9
        (tmp_path / "gate").touch()
        assert slow.result(60) == "gate"


@ray.remote(num_cpus=0, max_restarts=-1)
class Wrapped:
    """An environment as some documents write it: already an actor class."""

    def __init__(self, offset=0):
        self.offset = offset

    def step(self, x):
        return x + self.offset


def test_a_class_already_wrapped_in_ray_remote_is_a_pool_of_one_with_its_own_options(local_ray):
    with ActorPool(None, Wrapped, 4, {"offset": 1}) as pool:
        assert pool.num_actors == 1
        assert run_all(pool, "step", [1, 2, 3]) == [2, 3, 4]
    with InProcessPool(Wrapped, {"offset": 1}) as pool:
        assert run_all(pool, "step", [1, 2, 3]) == [2, 3, 4]


def test_a_pool_that_was_shut_down_says_so_and_leaves_no_process(local_ray):
    pool = ActorPool(None, Scorer, 1, deadlines=Deadlines(stop_s=5.0))
    (pid,) = pool.pids()
    pool.shutdown()
    pool.shutdown()
    assert not lives(pid)
    with pytest.raises(UserError, match="shut down"):
        pool.submit("square", 1)


def test_a_rank_without_a_stated_number_of_cpus_has_its_share_of_the_node_as_threads(local_ray):
    cpus = int(ray.cluster_resources()["CPU"])
    with RayVirtualCluster([1], use_gpus=False) as cluster:
        assert cluster.threads_of(cluster.bundles[0]) == cpus
        assert cluster.worker_share()["num_cpus"] == 1.0
