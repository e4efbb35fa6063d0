"""Shared code of policy workers: rows in plan order, metrics reduced as the loss requires, errors that name the key."""

import platform
import subprocess
import sys

import pytest
import torch

from rl_backends_base.microbatches import (
    MicrobatchSplitter,
    first_non_finite_loss,
    non_finite_step_error,
    reduce_metrics,
)
from rl_backends_base.optimizer_settings import build_scheduler, call_named
from rl_core.config.schema import PolicyConfig, SchedulerConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_core.errors import DataError, UserError
from rl_core.plugins.import_path import resolve

LENGTHS = [3, 9, 5, 2, 7, 4]
BUDGET = {"max_tokens_per_microbatch": 18, "input_key": "input_ids", "input_lengths_key": "input_lengths"}
FORMS = {
    "by count": ({}, {}),
    "by token budget": (
        {"dynamic_batching": {"enabled": True}},
        {"dynamic_batching_args": {**BUDGET, "sequence_length_round": 2}},
    ),
    "packed": (
        {"sequence_packing": {"enabled": True}},
        {"sequence_packing_args": {**BUDGET, "algorithm": "first_fit_decreasing"}},
    ),
}


def rows():
    lengths = torch.tensor(LENGTHS)
    column = torch.arange(10)
    return BatchedDataDict(
        input_ids=torch.where(column < lengths[:, None], torch.arange(60).view(6, 10) + 1, 0),
        input_lengths=lengths,
        token_mask=(column < lengths[:, None]).float(),
        sample_mask=torch.tensor([1.0, 1, 0, 1, 1, 1]),
        number=torch.arange(6),
    )


def cutter(**fields):
    return MicrobatchSplitter(PolicyConfig(backend="any", model_name="m", max_total_sequence_length=9, **fields))


@pytest.mark.parametrize("form", FORMS)
def test_every_row_is_in_one_microbatch_in_the_order_of_its_plan(form):
    fields, plan = FORMS[form]
    batch = rows()
    if plan:
        (batch,), order = batch.shard_by_batch_size(1, **plan)
        assert sorted(order) == list(range(6))
    parts = list(cutter(**fields).split(batch, rows=4))
    assert torch.cat([part["number"] for part in parts]).tolist() == batch["number"].tolist()
    if form == "by count":
        assert [part.size for part in parts] == [4, 2]
    for part in parts:
        lengths = part["input_lengths"]
        tokens = int(lengths.sum()) if form == "packed" else part["input_ids"].shape[1] * part.size
        assert form == "by count" or tokens <= 18


def test_training_counts_the_tokens_of_rows_that_count_and_scoring_all():
    read = cutter().read(rows(), training=True)
    assert read.mask.sum(1).tolist() == [3, 9, 0, 2, 7, 4]
    assert read.lengths.tolist() == LENGTHS
    assert cutter().read(rows(), training=False).mask is None


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ([3, 11, 5, 2, 7, 4], "a row of 11 tokens, but `input_ids` has only 10 columns"),
        ([3, 10, 5, 2, 7, 4], "A row has 10 tokens, but .* is 9"),
    ],
)
def test_rows_that_are_too_long_are_refused(lengths, says):
    batch = rows()
    batch["input_lengths"] = torch.tensor(lengths)
    with pytest.raises(DataError, match=says):
        cutter().read(batch, training=False)


def test_metrics_are_reduced_as_the_loss_declares_and_summed_by_default():
    found = [{"a": torch.tensor(1.0), "b": torch.tensor(2), "c": torch.tensor(5.0)} for _ in range(2)]
    found[1] = {name: value - 3 for name, value in found[1].items()}
    reduced = reduce_metrics(found, {"b": "min", "c": "max"})
    assert {name: float(value) for name, value in reduced.items()} == {"a": -1.0, "b": -1.0, "c": 5.0}
    assert reduce_metrics([], {}) == {}


def test_the_first_non_finite_loss_is_found_and_reported():
    assert first_non_finite_loss([1.0, torch.tensor(2.0)]) is None
    assert first_non_finite_loss([torch.tensor(1.0), float("inf"), torch.tensor(float("nan"))]) == 1
    assert "Optimizer step 4 was not taken: its gradient norm is nan. Here." in str(
        non_finite_step_error(4, "Here.", norm=float("nan"))
    )


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"name": "cosin"}, r"`policy.scheduler.name`: no schedule 'cosin'. Did you mean 'cosine'"),
        ({"name": "linear"}, r"`policy.scheduler.kwargs` is missing num_training_steps"),
        (
            {"name": "cosine", "kwargs": {"num_training_steps": 3, "warmup": 1}},
            r"`policy.scheduler.kwargs.warmup`: cosine takes",
        ),
        ({"name": "torch.optim.Adam", "kwargs": {"lr": -1.0}}, "Adam rejects"),
        ({"name": "collections.UserString"}, "returned a UserString, not a schedule"),
    ],
)
def test_an_invalid_schedule_is_reported_by_its_key(section, says):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    with pytest.raises(UserError, match=says):
        build_scheduler(optimizer, SchedulerConfig(**section))


def test_an_import_path_resolves_to_its_object_or_reports_where_it_fails():
    assert call_named(resolve("collections.Counter", key="k"), "aab", {}, key="k")["a"] == 2
    for dotted, says in (
        ("Counter", "a dotted path"),
        ("no.such", "cannot import 'no'"),
        ("collections.Countr", "'Counter'"),
    ):
        with pytest.raises(UserError, match=says):
            resolve(dotted, key="k")
    with pytest.raises(UserError, match="cannot be called"):
        call_named(3, None, {}, key="k")


FREED_BETWEEN = """
import psutil, torch
from rl_core.config.schema import PolicyConfig
from rl_core.data.batched_data_dict import BatchedDataDict
from rl_backends_base.microbatches import MicrobatchSplitter

def megabytes():
    return psutil.Process().memory_info().rss >> 20

splitter = MicrobatchSplitter(PolicyConfig(backend="any", model_name="m", max_total_sequence_length=9))
batch = BatchedDataDict(input_ids=torch.zeros(2, 9, dtype=torch.int64), input_lengths=torch.tensor([9, 9]))
torch.ones(2**22)  # 16 MiB: when they are freed, glibc decides to keep blocks of this size
microbatches = splitter.split(batch, rows=1)
for _ in microbatches:
    print(megabytes())
    kept = [torch.ones(2**18 + number) for number in range(200)]
    del kept[:-1]  # the last one is above the free memory, so freeing does not shrink the heap
    print(megabytes())
print(megabytes())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries return freed memory themselves")
def test_memory_that_a_microbatch_has_freed_is_returned_before_the_next_and_after_the_last():
    found = subprocess.run([sys.executable, "-c", FREED_BETWEEN], capture_output=True, text=True, check=True, timeout=240)
    _, used_by_first, before_second, used_by_second, end = map(int, found.stdout.split())
    assert before_second < used_by_first - 150
    assert end < used_by_second - 150
