"""Batches between real processes: pickle, Ray's object store, and a process group."""

import copy
import pickle
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import ray
import torch

from rl_core.data.batched_data_dict import BatchedDataDict, BorrowedColumn

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool, torch.float64]


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def big_batch(rows: int = 64, width: int = 1024) -> BatchedDataDict[Any]:
    """Large enough for Ray's shared store (small objects travel inside messages)."""
    return BatchedDataDict(
        {
            "input_ids": torch.arange(rows * width).reshape(rows, width),
            "token_mask": torch.ones(rows, width),
            "truncated": torch.arange(rows) % 2 == 0,
            "idx": list(range(rows)),
        }
    )


def same(one: BatchedDataDict[Any], other: BatchedDataDict[Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[key], other[key]) if isinstance(one[key], torch.Tensor) else one[key] == other[key] for key in one
    )


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("shape", [(3, 4), (3,), (0, 4), (3, 0), (2, 3, 2)], ids=str)
def test_a_pickled_batch_comes_back_the_same_in_every_dtype(protocol, shape):
    batch = BatchedDataDict({str(dtype): torch.randint(0, 2, shape).to(dtype) for dtype in DTYPES})
    arrived = pickle.loads(pickle.dumps(batch, protocol=protocol))
    assert same(arrived, batch)
    assert all(arrived[key].dtype == batch[key].dtype for key in batch)


def test_the_microbatch_plan_survives_pickling():
    batch = big_batch(rows=8, width=16)
    batch["input_lengths"] = torch.tensor([1, 9, 3, 16, 2, 2, 8, 5])
    args: Any = {
        "max_tokens_per_microbatch": 32,
        "sequence_length_round": 4,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
    }
    for shard in batch.shard_by_batch_size(2, dynamic_batching_args=args)[0]:
        arrived = pickle.loads(pickle.dumps(shard))
        assert type(arrived) is type(shard)
        assert arrived.micro_batch_indices == shard.micro_batch_indices
        assert arrived.micro_batch_lengths == shard.micro_batch_lengths
        assert arrived.elem_counts_per_gb == shard.elem_counts_per_gb


def test_sending_a_batch_does_not_copy_its_large_tensors():
    batch = big_batch()
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(batch.slice(8, 24), protocol=5, buffer_callback=buffers.append)
    addresses = {np.frombuffer(buffer, dtype=np.uint8).ctypes.data for buffer in buffers}
    assert addresses == {batch[key][8:].data_ptr() for key in ("input_ids", "token_mask")}
    assert len(message) < 2000


def test_small_tensors_are_part_of_the_message_and_arrive_as_private_tensors():
    batch = big_batch(rows=1, width=16)
    batch["bfloat16"] = torch.ones(1, 2, dtype=torch.bfloat16)
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    assert [buffer.raw().nbytes for buffer in buffers] == [4]  # NumPy has no bfloat16
    arrived = pickle.loads(message, buffers=[bytes(buffer.raw()) for buffer in buffers])
    assert same(arrived, batch)
    assert all(isinstance(arrived.data[key], torch.Tensor) for key in ("input_ids", "token_mask", "truncated"))
    arrived["input_ids"] += 1
    assert same(pickle.loads(message, buffers=[bytes(buffer.raw()) for buffer in buffers]), batch)


def test_tensors_inside_list_columns_travel_and_are_writable():
    tokens = torch.arange(1000)
    long = {"role": "assistant", "token_ids": tokens}
    batch = BatchedDataDict({"message_log": [[{"role": "user", "token_ids": tokens[2:5]}, long], []]})
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    assert sum(buffer.raw().nbytes for buffer in buffers) == tokens.nbytes  # the small one is part of the message
    arrived = pickle.loads(message, buffers=[bytes(buffer.raw()) for buffer in buffers])
    for message in arrived["message_log"][0]:
        message["token_ids"] += 1
    assert arrived["message_log"][0][0]["token_ids"].tolist() == [3, 4, 5]
    assert arrived["message_log"][0][1]["token_ids"].equal(tokens + 1)
    assert tokens[2] == 2


def test_tensors_with_gradients_or_strides_travel_as_plain_data():
    batch = BatchedDataDict({"logprobs": torch.ones(2, 3, requires_grad=True) * 2, "x": torch.arange(6).reshape(2, 3)[:, 1:]})
    arrived = pickle.loads(pickle.dumps(batch))
    assert not arrived["logprobs"].requires_grad
    assert arrived["x"].tolist() == [[1, 2], [4, 5]]


def test_a_deep_copy_shares_nothing_and_a_copy_shares_the_tensors():
    batch = big_batch(rows=2, width=2)
    deep, shallow = copy.deepcopy(batch), copy.copy(batch)
    batch["token_mask"].zero_()
    assert deep["token_mask"].sum() == 4
    assert shallow["token_mask"].sum() == 0


@pytest.fixture(scope="module")
def store(local_ray):
    """The object store of the local Ray."""


def test_a_batch_from_the_store_is_read_without_a_copy_and_written_to_in_private(store):
    batch = big_batch()
    reference = ray.put(batch)
    first, second = ray.get(reference), ray.get(reference)
    column, again = first.data["input_ids"], second.data["input_ids"]
    assert isinstance(column, BorrowedColumn)
    assert column.rows.ctypes.data == again.rows.ctypes.data
    first["input_ids"] += 1
    first["token_mask"][0] = 5.0
    first["truncated"].logical_not_()
    assert same(second, batch)
    assert same(ray.get(reference), batch)
    assert torch.equal(first["input_ids"], batch["input_ids"] + 1)


def test_slices_and_microbatches_of_a_batch_from_the_store_stay_borrowed_until_touched(store):
    arrived = ray.get(ray.put(big_batch()))
    for part in (arrived.slice(3, 9), *arrived.make_microbatch_iterator(32), *arrived.shard_by_batch_size(4)):
        assert isinstance(part.data["input_ids"], BorrowedColumn)
    assert torch.equal(arrived.slice(3, 9)["input_ids"], big_batch()["input_ids"][3:9])
    assert isinstance(arrived.data["input_ids"], BorrowedColumn)


def test_a_worker_may_change_what_it_was_given_and_give_it_back(store):
    @ray.remote
    def add_one(batch: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        batch["input_ids"] += 1
        return batch

    batch = big_batch()
    reference = ray.put(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Ray's own start of a worker
        changed = ray.get(add_one.remote(reference))
    assert torch.equal(changed["input_ids"], batch["input_ids"] + 1)
    assert torch.equal(changed["token_mask"], batch["token_mask"])
    assert same(ray.get(reference), batch)


RANK = """
import os, sys, torch, torch.distributed as dist
from rl_core.data.batched_data_dict import BatchedDataDict
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
batch = BatchedDataDict({"input_ids": torch.full((rank + 1, rank + 2), rank + 1), "idx": [rank] * (rank + 1)})
whole = batch.all_gather(dist.group.WORLD)
assert whole["input_ids"].tolist() == [[1, 1, 0], [2, 2, 2], [2, 2, 2]], whole
assert whole["idx"] == [0, 1, 1], whole
dist.destroy_process_group()
os._exit(0)  # a thread of gloo that outlives its group would abort a finalizing interpreter
"""


@pytest.mark.slow
def test_all_gather_gives_every_rank_the_rows_of_all_in_rank_order(tmp_path):
    command = [sys.executable, "-c", RANK]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path / "meet")], stderr=subprocess.PIPE) for rank in range(2)]
    ends = [rank.communicate(timeout=240) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ends
