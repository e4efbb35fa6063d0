"""Streaming rows from vLLM: in order of completion, equal to `generate`, across refits, and cancelled without a consumer."""

import asyncio
import os
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from readable_model import (
    LENGTH,
    batch_of,
    completions,
    expected_logprobs,
    found_logprobs,
    plain_scores,
    random_batch,
    rows_of,
)
from tiny_models import take_step
from transformers import AutoModelForCausalLM

from rl_backends_hf import HuggingFacePolicy
from rl_backends_hf.config import HFPolicyConfig
from rl_backends_vllm import VllmConfig, VllmGeneration
from rl_backends_vllm.async_engine import SHUTDOWN_TIMEOUT_S
from rl_core.cluster import RayVirtualCluster
from rl_core.cluster.worker_group import Deadlines
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import DataError
from rl_train.weight_sync.sender import WeightSender
from rl_train.weight_sync.synchronizer import WeightSynchronizer
from rl_train.weight_sync.transports import SharedMemoryTransport

pytestmark = pytest.mark.vllm

TEMPERATURE = 0.7
LONG = 2400
KINDS = {"in this process": False, "in a process of its own": True}


@pytest.fixture(params=KINDS, scope="module")
def kind(request):
    return {"async_engine": KINDS[request.param], "temperature": TEMPERATURE, "max_new_tokens": LONG}


@pytest.fixture(scope="module")
def before(engines, kind):
    """Child processes, threads and folders before the first engine of this kind."""
    engines.shutdown()  # one engine at a time in this process
    return processes(), set(threading.enumerate()), own_folders()


@pytest.fixture
def engine(engines, before, kind):
    made = engines(**kind)
    yield made
    assert requests_in(made) == 0, "a test left rows behind"


@pytest.fixture(scope="module")
def long(engines, kind):
    """Tokens that take the engine two seconds, however fast the machine is: enough time to do something meanwhile."""
    few = random_batch(rows=5, max_new_tokens=torch.full((5,), 50))
    engine = engines(**kind)
    engine.generate(few)
    began = time.perf_counter()
    engine.generate(few)
    return min(max(int(50 * 2.0 / (time.perf_counter() - began)), 400), LONG)


def requests_in(engine):
    """Requests in flight inside vLLM."""
    worker = engine.group.worker
    assert len(worker._requests) == 0
    return worker._running._engine.output_processor.get_num_unfinished_requests()


class Trained:
    """A policy with the readable model's weights, which change completely on request."""

    def __init__(self, model, folder):
        self.policy = HuggingFacePolicy(
            config=HFPolicyConfig(
                model_name=model, max_total_sequence_length=64, generation={"backend": "hf", "temperature": TEMPERATURE}
            )
        )
        self.policy.wait_ready()
        self._weights = self.policy.group.worker.iter_weights
        self._first = {name: tensor.detach().clone() for name, tensor in self._weights()}
        self._folder, self._noise = folder, torch.Generator().manual_seed(0)

    def change(self):
        """Changes the weights and increments the version; returns the same model in plain Transformers."""
        take_step(self.policy, 1)
        with torch.no_grad():
            for name, tensor in self._weights():
                tensor.copy_(self._first[name] + 0.05 * torch.randn(tensor.shape, generator=self._noise))
        folder = self._folder / str(self.policy.weight_version)
        self.policy.save_checkpoint(str(folder))
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def trained(readable, tmp_path_factory):
    made = Trained(readable, tmp_path_factory.mktemp("trained"))
    yield made
    made.policy.shutdown()


def synchronizer(policy, engine):
    return WeightSynchronizer(policy, engine, WeightSender(policy, SharedMemoryTransport))


async def collected(engine, batch, greedy=False):
    return [item async for item in engine.generate_async(batch, greedy)]


async def collected_from_one_step_on(engine, batch):
    """The rows of an engine that was paused until it had all requests."""
    worker = engine.group.worker
    worker._running.pause()
    rows = asyncio.create_task(collected(engine, batch))
    while len(worker._requests) < batch.size:
        await asyncio.sleep(0.01)
    worker._resume()
    return await rows


def in_order(items):
    return [output for _, output in sorted(items, key=lambda item: item[0])]


def completion_lengths(items):
    return {row: int(output["generation_lengths"]) for row, output in items}


def same_rows(items, expected):
    """Streamed rows equal the output of `generate` without padding."""
    for row, (found, (_, tokens, logprobs)) in enumerate(zip(in_order(items), rows_of(expected), strict=True)):
        [(_, found_tokens, found_scores)] = rows_of(found)
        assert torch.equal(found_tokens, tokens)
        torch.testing.assert_close(found_scores, logprobs, atol=1e-5, rtol=0)
        assert found["truncated"].tolist() == expected["truncated"][row : row + 1].tolist()


@pytest.mark.slow
def test_rows_come_as_they_end_and_are_those_of_generate(engine):
    limits = torch.tensor([200, 5, 60, 1])
    batch = random_batch(rows=4, max_new_tokens=limits)
    mask = (torch.arange(batch["input_ids"].shape[1]) < batch["input_lengths"][:, None]).long()
    batch = BatchedDataDict({**batch, "attention_mask": mask, "notes": ["no business of the engine's"] * 4})
    del batch["input_lengths"]
    items = asyncio.run(collected_from_one_step_on(engine, batch))
    assert [row for row, _ in items] == [3, 1, 2, 0]
    same_rows(items, engine.generate(batch))


@pytest.mark.slow
def test_rows_that_stream_are_returned_while_they_are_sampled_and_others_only_at_their_end(engine):
    assert engine.streams_tokens
    batch = random_batch(rows=4, max_new_tokens=torch.tensor([300, 40, 300, 1]))
    asked = torch.tensor([True, False, True, True])
    items = asyncio.run(collected(engine, BatchedDataDict({**batch, "stream_tokens": asked})))
    rows = {row: [output for number, output in items if number == row] for row in range(4)}
    same_rows([(row, outputs[-1]) for row, outputs in rows.items()], engine.generate(batch))
    assert len(rows[1]) == 1
    assert max(len(rows[0]), len(rows[2])) > 2
    for *before, last in rows.values():
        assert "unfinished" not in last
        lengths = [int(output["generation_lengths"]) for output in (*before, last)]
        assert lengths == sorted(lengths)
        for output in before:
            assert output["unfinished"].tolist() == [True]
            length = int(output["unpadded_sequence_lengths"])
            assert output["output_ids"].tolist() == last["output_ids"][:, :length].tolist()
            assert output["logprobs"].tolist() == last["logprobs"][:, :length].tolist()


@pytest.mark.slow
def test_progress_is_read_in_another_thread_while_a_batch_is_sampled_and_changes_no_output(engine, monkeypatch):
    batch, seen = random_batch(rows=4, max_new_tokens=torch.tensor([60, 5, 40, 60])), []
    expected = engine.generate(batch)
    processor = engine.group.worker._running._engine.output_processor
    process = processor.process_outputs

    def process_and_read(*arguments, **keywords):
        processed = process(*arguments, **keywords)
        seen.append(reader.submit(engine.batch_progress).result())
        return processed

    with ThreadPoolExecutor(1) as reader:
        monkeypatch.setattr(processor, "process_outputs", process_and_read)
        output = engine.generate(batch)
        monkeypatch.undo()
    total = int(output["generation_lengths"].sum())
    assert engine.batch_progress() == (4, total)
    assert all(rows <= 4 and tokens <= total for rows, tokens in seen)
    # Rows that end are counted a moment later, those that continue at once.
    assert len({tokens for _, tokens in seen}) > 20
    assert {rows for rows, _ in seen} & {1, 2, 3}
    for key in expected:
        assert torch.equal(output[key], expected[key]), key


def test_sampled_and_greedy_rows_share_the_engine_independently(engine, plain):
    sampled, greedy = random_batch(rows=6, seed=1), random_batch(rows=6, seed=2)
    limits = torch.tensor([40, 3, 25, 9, 60, 14])
    sampled["max_new_tokens"], greedy["max_new_tokens"] = limits, limits.flip(0)

    async def together():
        return await asyncio.gather(collected(engine, sampled), collected(engine, greedy, greedy=True))

    found_sampled, found_greedy = asyncio.run(together())
    same_rows(found_sampled, engine.generate(sampled))
    same_rows(found_greedy, engine.generate(greedy, greedy=True))
    # The temperature of a greedy row follows it through the places of vLLM's batch.
    for output in in_order(found_greedy):
        expected = expected_logprobs(plain, output, temperature=TEMPERATURE)
        torch.testing.assert_close(found_logprobs(output), expected, atol=1e-5, rtol=0)


async def leave_after_the_first(engine, batch):
    async for row, _ in engine.generate_async(batch):
        return row


async def cancel(engine, batch):
    task = asyncio.create_task(collected(engine, batch))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("leave", [leave_after_the_first, cancel])
def test_leaving_the_iterator_leaves_the_engine_without_rows(engine, leave):
    batch = random_batch(rows=4, max_new_tokens=torch.tensor([2, LONG, LONG, LONG]))
    asyncio.run(leave(engine, batch))
    assert requests_in(engine) == 0
    short = random_batch(rows=2, max_new_tokens=torch.tensor([3, 3]))
    assert sorted(row for row, _ in asyncio.run(collected(engine, short))) == [0, 1]


def test_the_error_of_a_bad_row_is_raised_only_to_its_caller(engine):
    good = random_batch(rows=3, max_new_tokens=torch.tensor([50, 60, 70]))

    async def both():
        others = asyncio.create_task(collected(engine, good))
        await asyncio.sleep(0.01)
        with pytest.raises(DataError, match=r"^Row 1 has token id 9999"):
            await collected(engine, batch_of([4], [9999]))
        return await others

    same_rows(asyncio.run(both()), engine.generate(good))


async def refit_after_the_first(engine, batch, sync):
    """The rows, with a refit as soon as the first has ended."""
    items = []
    async for item in engine.generate_async(batch):
        if not items:
            sync.sync()
        items.append(item)
    return items


@pytest.mark.slow
def test_rows_in_flight_at_a_refit_keep_their_tokens_and_continue_with_new_weights(engine, long, trained):
    sync = synchronizer(trained.policy, engine)
    old_model = trained.change()
    sync.sync()
    old_version = trained.policy.weight_version
    # The first is long enough that the others are in flight when it ends: each reaches the engine on its own.
    first = 40
    batch = random_batch(rows=5, max_new_tokens=torch.tensor([first, long, long, long, long]))
    before = engine.generate(batch_of_same(batch, max_new_tokens=torch.full((5,), first)))
    new_model = trained.change()
    items = asyncio.run(refit_after_the_first(engine, batch, sync))
    assert requests_in(engine) == 0
    kept_by = {}
    for row, output in items:
        [(prompt, tokens, logprobs)] = rows_of(output)
        old = (plain_scores(old_model, tokens, temperature=TEMPERATURE)[prompt - 1 :] - logprobs).abs() < 1e-4
        new = (plain_scores(new_model, tokens, temperature=TEMPERATURE)[prompt - 1 :] - logprobs).abs() < 1e-4
        kept = int(old.long().cumprod(0).sum())
        assert new[kept:].all()
        # Its keys and values are those of the new weights from the first token of the prompt on, or `new` would fail.
        # A row is stamped with the weights that it began with.
        assert int(output["weight_version"]) == (old_version if kept else old_version + 1)
        kept_by[row] = kept
        assert completions(output)[0][: min(kept, first)] == completions(before)[row][: min(kept, first)]
    assert kept_by[0] == first
    assert any(3 < kept < completion_lengths(items)[row] for row, kept in kept_by.items() if row != 0)


def test_rows_that_arrive_during_a_refit_wait_for_its_weights(engine, trained):
    new_model = trained.change()
    sync = synchronizer(trained.policy, engine)
    batch = random_batch(rows=3, max_new_tokens=torch.tensor([5, 6, 7]))

    async def arrive():
        engine.prepare_refit_info(trained.policy.prepare_refit_info())
        rows = asyncio.create_task(collected(engine, batch))
        await asyncio.sleep(0.3)
        assert not rows.done()
        sync.sync()
        return await rows

    for output in in_order(asyncio.run(arrive())):
        assert output["weight_version"].tolist() == [trained.policy.weight_version]
        expected = expected_logprobs(new_model, output, temperature=TEMPERATURE)
        torch.testing.assert_close(found_logprobs(output), expected, atol=1e-5, rtol=0)


async def refit_after_each_of_three(engine, batch, sync, change):
    """The rows, with other weights after each of the first three; no row advances while they are made."""
    items = []
    async for item in engine.generate_async(batch):
        if len(items) < 3:
            engine.group.worker._running.pause()
            change()
            sync.sync()
        items.append(item)
    return items


def test_each_token_of_a_row_that_spans_three_refits_has_the_version_whose_weights_score_it(engine, long, trained):
    sync, models = synchronizer(trained.policy, engine), {}

    def change():
        model = trained.change()
        models[trained.policy.weight_version] = model

    change()
    sync.sync()
    batch = random_batch(rows=5, max_new_tokens=torch.tensor([40, 80, 120, long, long]))
    items = asyncio.run(refit_after_each_of_three(engine, batch, sync, change))
    assert requests_in(engine) == 0
    spanned = set()
    for _, output in items:
        [(prompt, tokens, logprobs)] = rows_of(output)
        versions = output["token_versions"][0, prompt : len(tokens)]
        assert output["token_versions"][0, :prompt].tolist() == [-1] * prompt
        assert int(output["weight_version"]) == int(versions.min())
        scores = {
            version: plain_scores(model, tokens, temperature=TEMPERATURE)[prompt - 1 :] for version, model in models.items()
        }
        assert difference(scores, versions, logprobs) < 1e-4
        spanned.add(len(versions.unique()))
        if len(versions.unique()) > 1:  # other weights are tenths of a nat away
            assert difference(scores, torch.cat([versions[:1], versions[:-1]]), logprobs) > 1e-2
            assert difference(scores, torch.cat([versions[1:], versions[-1:]]), logprobs) > 1e-2
    assert spanned >= {1, 4}


def difference(scores, versions, logprobs):
    """Largest difference between the log-probabilities and the scores of their versions."""
    found = torch.stack([scores[version][at] for at, version in enumerate(versions.tolist())])
    return float((found - logprobs).abs().max())


def batch_of_same(batch, **columns):
    return BatchedDataDict({**batch, **columns})


@pytest.mark.slow
def test_an_engine_that_was_shut_down_leaves_nothing_behind(engines, before, kind):
    """The last test of each kind of engine, because it shuts the engine down."""
    children, threads, folders = before
    engine, segments = engines(**kind), shared_memory()
    with pytest.raises(KeyboardInterrupt):  # leaves rows in flight in the engine
        asyncio.run(interrupted(engine))
    assert (processes() != children) == kind["async_engine"]
    began = time.monotonic()
    assert engine.shutdown()
    # A group kills workers that take longer. The rows are not waited for: 2,400 tokens take longer than that.
    assert time.monotonic() - began < Deadlines().stop_s
    assert Deadlines().stop_s > SHUTDOWN_TIMEOUT_S
    assert engine.shutdown()
    # On a busy machine, a process takes a moment to end.
    until = time.monotonic() + 120
    while processes() != children and time.monotonic() < until:
        time.sleep(0.05)
    assert processes() == children
    assert shared_memory() == segments
    assert own_folders() == folders
    assert {thread.name for thread in set(threading.enumerate()) - threads if not thread.daemon} == set()
    assert "vllm" not in {thread.name for thread in threading.enumerate()}


async def interrupted(engine):
    async for _ in engine.generate_async(random_batch(rows=2, max_new_tokens=torch.tensor([2, LONG]))):
        engine._stream._replicas[0].in_flight.clear()
        raise KeyboardInterrupt


def processes():
    """Children of this process, except Python's resource tracker."""
    living = [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    return {child.pid for child in living if "resource_tracker" not in " ".join(child.cmdline())}


def own_folders():
    """Temporary folders of engines that belong to this process."""
    return {path.name for path in Path(tempfile.gettempdir()).glob(f"rlcore-*{os.getpid()}*")}


def shared_memory():
    """Shared-memory segments of this process only."""
    return {path.name for path in Path("/dev/shm").glob(f"rlcore-{os.getpid()}-*")}


@pytest.fixture(scope="module")
def cluster(local_ray):
    with RayVirtualCluster([2], use_gpus=False, cpus_per_bundle=1, max_colocated_worker_groups=1) as made:
        yield made


@pytest.mark.full("backends_base/dispatch/test_streaming.py has two replicas; test_replicas.py has vLLM over Ray")
@pytest.mark.slow
def test_two_replicas_generate_stream_and_refit_like_one(cluster, readable, plain, trained):
    new_model, segments = trained.change(), shared_memory()
    config = VllmConfig(
        model_name=readable,
        max_new_tokens=100,
        temperature=TEMPERATURE,
        top_p=1,
        top_k=None,
        backend="vllm",
        vllm_cfg={
            "tensor_parallel_size": 1,
            "gpu_memory_utilization": 0.8,
            "max_model_len": LENGTH,
            "precision": "float32",
        },
    )
    generator = VllmGeneration(cluster, config)
    try:
        assert generator.num_workers == 2
        unseeded = batch_of(*[[5, 6, 7], [8, 9]] * 3)
        generator.prepare_for_generation()
        rows = completions(generator.generate(unseeded, greedy=False))
        rows += completions(generator.generate(unseeded, greedy=False))
        assert generator.finish_generation()
        assert len({tuple(row) for row in rows}) == 12, "replicas and calls draw from seeds of their own"

        batch = random_batch(rows=9, max_new_tokens=torch.tensor([90, 3, 20, 80, 5, 6, 7, 8, 60]))
        whole = generator.generate(batch)
        expected = expected_logprobs(plain, whole, temperature=TEMPERATURE)
        torch.testing.assert_close(found_logprobs(whole), expected, atol=1e-5, rtol=0)
        loads, items = asyncio.run(watched(generator, batch))
        same_rows(items, whole)
        assert loads == [5, 4]

        sync = synchronizer(trained.policy, generator)
        version = trained.policy.weight_version
        _, items = asyncio.run(refit_beside(generator, batch, sync))
        assert sync.is_stale is False
        assert {int(output["weight_version"]) for _, output in items} <= {-1, version}
        again = generator.generate(batch)
        assert again["weight_version"].tolist() == [version] * 9
        expected = expected_logprobs(new_model, again, temperature=TEMPERATURE)
        torch.testing.assert_close(found_logprobs(again), expected, atol=1e-5, rtol=0)
    finally:
        generator.shutdown()
    assert len(shared_memory() - segments) <= 2, "only the pair that the policy keeps for its next refit"


async def watched(generator, batch):
    """The distribution of the rows before any has ended, and the rows."""
    rows = asyncio.create_task(collected(generator, batch))
    while not sum(generator._stream._affinity.load):
        await asyncio.sleep(0)
    loads = generator._stream._affinity.load
    return loads, await rows


async def refit_beside(generator, batch, sync):
    """A refit in a thread while rows are requested and returned."""
    return await asyncio.gather(asyncio.to_thread(sync.sync), collected(generator, batch))


@pytest.mark.full("all engines of conftest.py are configured by a mapping; test_replicas.py has a cluster")
@pytest.mark.slow
def test_a_plain_mapping_configures_a_replica_on_a_cluster(cluster, readable):
    vllm_config = {
        "model_name": readable,
        "max_new_tokens": 10,
        "temperature": 0.7,
        "top_p": 1,
        "top_k": None,
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": 0.8,
        "max_model_len": 128,
    }
    generator = VllmGeneration(cluster, vllm_config, num_workers=1)
    try:
        data = BatchedDataDict({"input_ids": torch.tensor([[1, 2, 3, 4]]), "attention_mask": torch.tensor([[1, 1, 1, 1]])})
        generator.prepare_for_generation()
        output = generator.generate(data, greedy=False)
        generator.finish_generation()
        assert output["output_ids"][0, :4].tolist() == [1, 2, 3, 4]
        assert output["unpadded_sequence_lengths"].tolist() == [14]
        pids = generator.group.pids()
    finally:
        generator.shutdown()
    assert not [pid for pid in pids if lives(pid)]


def lives(pid):
    """Whether the process exists and is not a zombie that Ray has yet to reap."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
