"""The math environment in a Ray actor: it grades answers, and killing the actor ends its processes."""

from __future__ import annotations

import time

import psutil
import pytest
import ray

from rl_envs.math.environment import MathEnvironment


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def ray_alone(no_ray):
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


@pytest.mark.slow
def test_it_grades_in_an_actor_and_its_processes_end_with_the_actor(ray_alone):
    actor = ray.remote(MathEnvironment).remote({"num_processes": 2})
    conversations = [[{"role": "assistant", "content": rf"\boxed{{{n}}}"}] for n in (1, 2, 3)]
    graded = ray.get(actor.step.remote(conversations, [{"expected_answer": "2"}] * 3), timeout=120)
    pids = ray.get(actor.process_ids.remote(), timeout=60)
    assert graded.rewards.tolist() == [0.0, 1.0, 0.0]
    assert len(pids) == 2

    ray.kill(actor)
    deadline = time.monotonic() + 120.0
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in pids if is_running(pid)] == []
