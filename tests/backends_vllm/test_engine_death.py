"""Death of vLLM's engine core, which is a separate process with `async_engine`: noticed by every call, and replaced."""

import asyncio
import queue
import signal
import threading
from concurrent.futures import Future
from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest
import torch
from readable_model import LENGTH, random_batch
from tiny_models import take_step

from rl_backends_hf import HuggingFacePolicy
from rl_backends_hf.config import HFPolicyConfig
from rl_backends_vllm import VllmGeneration, async_engine
from rl_backends_vllm.async_engine import AsyncEngine
from rl_core.errors import EngineDiedError, WorkerDiedError
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer
from rl_train.weight_sync.transports import SharedMemoryTransport

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

RESTARTS = 2
EVERY_CALL = {
    "add": lambda engine: engine.add("new", [5, 6], None),
    "abort": lambda engine: engine.abort(["old"]),
    "finished": lambda engine: engine.finished(0.01),
    "rpc": lambda engine: engine.refit("get_weight_version"),
    "pause": lambda engine: engine.pause(),
    "resume": lambda engine: engine.resume(),
    "reset_prefix_cache": lambda engine: engine.reset_prefix_cache(),
    "sleep": lambda engine: engine.sleep(1),
    "wake": lambda engine: engine.wake("weights"),
}


def core_of(engine):
    """The engine core of a replica in this process."""
    [core] = engine.group.worker._engine._engine.engine_core.resources.engine_manager.processes
    return psutil.Process(core.pid)


def kill_core(engine):
    with suppress(psutil.NoSuchProcess):  # another test may have killed it
        core = core_of(engine)
        core.kill()
        core.wait()


@pytest.fixture(scope="module")
def engine(readable):
    """One engine, which two tests may restart, because each start takes twenty CPU seconds."""
    made = VllmGeneration(
        config={
            "model_name": readable,
            "precision": "float32",
            "max_model_len": LENGTH,
            "max_num_seqs": 32,
            "max_new_tokens": 400,
            "async_engine": True,
            "max_restarts": RESTARTS,
        }
    )
    made.wait_ready()
    yield made
    made.shutdown()


def batch(tokens=400, **columns):
    return random_batch(rows=5, max_new_tokens=torch.full((5,), tokens), **columns)


def test_rows_of_an_engine_core_that_exits_are_sampled_again_by_its_replacement(engine):
    undisturbed, restarts = engine.generate(batch()), engine.restarts
    engine.generate(batch(tokens=2))

    async def sample_and_kill():
        ended = {}
        core = core_of(engine)
        short_first = batch()
        short_first["max_new_tokens"][0] = 1
        async for row, output in engine.generate_async(short_first):
            if not ended:
                core.kill()
            ended[row] = output
        return ended

    ended = asyncio.run(sample_and_kill())
    assert engine.restarts == restarts + 1
    assert sorted(ended) == list(range(5))
    for row in range(1, 5):
        length = int(undisturbed["unpadded_sequence_lengths"][row])
        assert torch.equal(ended[row]["output_ids"][0, :length], undisturbed["output_ids"][row, :length])


def test_a_refit_continues_with_a_new_engine_core_if_the_old_one_exits(engine, readable):
    policy = HuggingFacePolicy(config=HFPolicyConfig(model_name=readable))
    sync = WeightSynchronizer(policy, engine, WeightSender(policy, SharedMemoryTransport))
    try:
        sync.sync()
        restarts = engine.restarts
        take_step(policy, 1)
        core_of(engine).kill()
        sync.sync()
        assert engine.restarts == restarts + 1
        assert engine.generate(batch(tokens=2))["weight_version"].unique().tolist() == [1]
    finally:
        sync.close()
        policy.shutdown()


def test_every_call_of_an_engine_whose_core_exits_raises(engine):
    running, core = engine.group.worker._engine, core_of(engine)
    core.send_signal(signal.SIGSTOP)  # the core does not answer a call that has reached it
    errors = []

    def call():
        try:
            running.reset_prefix_cache()
        except EngineDiedError as error:
            errors.append(str(error))

    pending = threading.Thread(target=call)
    pending.start()
    core.kill()
    pending.join()
    assert errors == ["The core process of the vLLM engine exited."]
    for late in EVERY_CALL.values():
        with pytest.raises(EngineDiedError):
            late(running)


def test_the_exit_of_a_core_is_an_error_if_no_restart_is_left(engine):
    for _ in range(engine.restarts, RESTARTS):
        kill_core(engine)
        engine.generate(batch(tokens=2))
    kill_core(engine)
    with pytest.raises(WorkerDiedError, match=rf"`policy.generation.max_restarts` \({RESTARTS}\)"):
        engine.generate(batch(tokens=2))


@pytest.mark.parametrize(
    ("has_exited", "words"), [(True, "core process of the vLLM engine exited"), (False, "core of its engine failed")]
)
def test_a_core_that_failed_is_not_reported_as_exited(has_exited, words):
    dead = object.__new__(AsyncEngine)
    dead._death, dead._sentinels = Future(), []
    if has_exited:
        dead._death.set_result(None)
    dead._engine = SimpleNamespace(errored=True)
    dead._finished = queue.SimpleQueue()
    with pytest.raises(EngineDiedError, match=words):
        dead.finished(wait_s=0.0)


def test_the_error_of_an_engine_that_does_not_start_is_kept_if_its_event_loop_is_blocked(monkeypatch, own_messages):
    monkeypatch.setattr(async_engine, "STOP_LOOP_TIMEOUT_S", 0.01)
    release, loops = threading.Event(), []

    class Blocked(AsyncEngine):
        async def _start(self, arguments):
            loops.append(asyncio.get_running_loop())
            loops[0].call_soon(loops[0].call_soon, release.wait)  # after the result of this coroutine is set
            raise ValueError("max_num_seqs must be positive")

    try:
        with pytest.raises(ValueError, match="max_num_seqs must be positive"):
            Blocked({})
        assert not loops[0].is_closed()
        assert any("did not stop" in message for message in own_messages())
    finally:
        release.set()


def test_shutdown_ends_if_the_engine_cannot_be_freed(monkeypatch, own_messages):
    # Closing the context of vLLM's sockets can block forever, which happened once after a core was killed.
    monkeypatch.setattr(async_engine, "STOP_LOOP_TIMEOUT_S", 0.01)
    release = threading.Event()

    class Client:
        vllm_config = None

        def shutdown(self, timeout):
            pass

        def __del__(self):
            release.wait()

    class Started(AsyncEngine):
        async def _start(self, arguments):
            return Client(), [], asyncio.get_running_loop().create_future()

    stopping = threading.Thread(target=Started({}).shutdown, daemon=True)
    try:
        stopping.start()
        stopping.join(timeout=30)
        assert not stopping.is_alive()
        assert any("did not stop" in message for message in own_messages())
    finally:
        release.set()
