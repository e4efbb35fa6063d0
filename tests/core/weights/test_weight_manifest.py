from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_refit_workers import TinyModel

from rl_core.errors import WeightSyncError
from rl_core.weights.manifest import (
    fill,
    in_manifest_order,
    lay_out,
    manifest_of,
    manifest_to_send,
    refuse_differences,
    split_into_buckets,
    weights_of,
)

forms = st.tuples(st.lists(st.integers(0, 9), max_size=3).map(tuple), st.sampled_from(["float32", "bfloat16", "int8"]))
manifests = st.dictionaries(st.text("abcdef.", min_size=1, max_size=8), forms, max_size=12)


@given(manifest=manifests, budget=st.integers(1, 2000))
def test_buckets_contain_every_name_once_in_order_within_the_budget_except_for_large_tensors(manifest, budget):
    buckets = split_into_buckets(manifest, budget_bytes=budget)
    large = [name for name in manifest if lay_out(manifest, [name])[1] > budget]
    names = [name for bucket in buckets for name in bucket]
    assert names == [name for name in manifest if name not in large] + large
    assert buckets[len(buckets) - len(large) :] == [[name] for name in large]
    assert all(lay_out(manifest, bucket)[1] <= budget for bucket in buckets[: len(buckets) - len(large)])


@given(manifest=manifests, budget=st.integers(1, 2000))
def test_buckets_in_the_manifests_order_are_the_same_buckets_cut_where_a_large_tensor_belongs(manifest, budget):
    buckets = split_into_buckets(manifest, budget_bytes=budget)
    ordered = in_manifest_order(buckets, manifest)
    assert [name for bucket in ordered for name in bucket] == list(manifest)
    assert all(any(set(cut) <= set(bucket) for bucket in buckets) for cut in ordered)
    assert len(ordered) <= 2 * len(buckets)


def test_tensors_that_an_engine_fuses_share_a_bucket_if_they_fit():
    parts = ["attn.q.weight", "attn.k.weight", "attn.v.weight", "mlp.gate.weight", "mlp.up.weight"]
    manifest = {f"layers.{layer}.{part}": ((16,), "float32") for layer in range(3) for part in parts}
    buckets = split_into_buckets(manifest, budget_bytes=4 * 64)
    modules = [{name.rsplit(".", 2)[0] for name in bucket} for bucket in buckets]
    assert all(left.isdisjoint(right) for left, right in pairwise(modules))
    # Three parts do not fit into room for two: they are cut as anything else.
    assert max(map(len, split_into_buckets(manifest, budget_bytes=2 * 64))) == 2


@given(manifest=manifests, transposed=st.booleans())
def test_tensors_packed_into_a_bucket_are_unpacked_bit_for_bit(manifest, transposed):
    tensors = {name: torch.randint(-100, 100, shape).to(getattr(torch, dtype)) for name, (shape, dtype) in manifest.items()}
    if transposed:  # the same shapes, contiguous along the first axis
        tensors = {name: tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor for name, tensor in tensors.items()}
    placements, size = lay_out(manifest, manifest)
    buffer = torch.empty(size, dtype=torch.uint8)
    fill(buffer, placements, iter(tensors.items()), manifest)
    assert all(torch.equal(placements[name].view(buffer), tensor) for name, tensor in tensors.items())


def test_weights_are_sent_in_the_receivers_dtype_if_narrower_and_rounded_as_by_torch():
    manifest = {"a": ((3, 2), "float32"), "b": ((2,), "bfloat16"), "c": ((2,), "int64"), "d": ((2,), "float32")}
    sent = manifest_to_send(manifest, {"a": "bfloat16", "b": "float32", "c": "int32"})
    assert [dtype for _, dtype in sent.values()] == ["bfloat16", "bfloat16", "int64", "float32"]
    placements, size = lay_out({"a": sent["a"]}, ["a"])
    buffer = torch.empty(size, dtype=torch.uint8)
    tensor = torch.randn(3, 2)
    fill(buffer, placements, iter([("a", tensor)]), manifest)
    assert torch.equal(placements["a"].view(buffer), tensor.bfloat16())


def test_tensors_that_differ_from_the_manifest_are_rejected():
    manifest = {"a": ((2,), "float32"), "b": ((2,), "float32")}
    placements, size = lay_out(manifest, manifest)
    buffer = torch.empty(size, dtype=torch.uint8)
    for given_tensors, culprit in [
        ([("a", torch.zeros(2))], "'?b"),
        ([("a", torch.zeros(2)), ("a", torch.zeros(2))], "'a'"),
        ([("c", torch.zeros(2))], "'c'"),
        ([("a", torch.zeros(3))], r"'a' as float32 \[3\]"),
        ([("a", torch.zeros(2, dtype=torch.bfloat16))], "'a' as bfloat16"),
    ]:
        with pytest.raises(WeightSyncError, match=culprit):
            fill(buffer, placements, iter(given_tensors), manifest)


def test_weights_of_a_module_leaves_out_tied_names_and_buffers_that_are_not_saved():
    names = set(weights_of(TinyModel(0)))
    assert "embed.weight" in names
    assert "running" in names
    assert names.isdisjoint({"head.weight", "scratch"})


def test_one_error_names_every_difference_between_policy_and_engine():
    manifest = {"a": ((2, 3), "float32"), "b": ((4,), "float32"), "c": ((), "float32")}
    engine = {"a": torch.zeros(3, 2), "c": torch.zeros(()), "d": torch.zeros(1)}
    with pytest.raises(WeightSyncError) as caught:
        refuse_differences(manifest, manifest_of(engine))
    text = str(caught.value)
    assert "a: [2, 3] in the policy, [3, 2] in the engine" in text
    assert "b: the policy sends it, but the engine has no such weight" in text
    assert "d: the engine has it, but the policy does not send it" in text


def test_a_manifest_lists_shapes_and_dtypes():
    assert manifest_of({"x": torch.zeros(2, 3, dtype=torch.bfloat16)}) == {"x": ((2, 3), "bfloat16")}
