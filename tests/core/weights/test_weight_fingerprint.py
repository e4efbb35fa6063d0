"""The fingerprint: equal for equal weights, different for every known kind of corruption."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.errors import WeightSyncError
from rl_core.weights.fingerprint import combine, describe_differences, tensor_digest, tensor_digests
from rl_train.weight_sync.sender import kind_of

KINDS = ["xxh3", "wsum"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-120, 120, shape, generator=generator).to(dtype)


shapes = st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple)


def flip_bit(tensor: torch.Tensor, bit: int) -> torch.Tensor:
    flipped = tensor.clone()
    data = flipped.reshape(-1).view(torch.uint8)
    data[bit // 8] ^= 1 << (bit % 8)
    return flipped


@pytest.mark.parametrize("kind", KINDS)
@given(shape=shapes, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_digests_do_not_depend_on_memory_layout(kind, shape, dtype, seed):
    tensor = random_tensor(shape, dtype, seed)
    shifted = torch.empty(tensor.numel() + 1, dtype=dtype)[1:].view(shape)
    shifted.copy_(tensor)
    strided = torch.stack([tensor, tensor], dim=-1)[..., 0]
    digest = tensor_digest(tensor, kind=kind)
    assert digest == tensor_digest(shifted, kind=kind) == tensor_digest(strided, kind=kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (0, 3), (7, 5), (300, 500)])
def test_a_digest_in_another_dtype_equals_the_digest_of_the_cast_tensor(kind, shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        assert tensor_digests([("", tensor)], kind=kind, dtypes={"": dtype})[""] == tensor_digest(tensor.to(dtype), kind=kind)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), dtype=st.sampled_from(DTYPES[:-1]), seed=st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_one_flipped_bit_changes_the_digest(kind, data, dtype, seed):
    tensor = random_tensor((data.draw(st.integers(1, 40)), 3), dtype, seed)
    bit = data.draw(st.integers(0, tensor.numel() * tensor.element_size() * 8 - 1))
    assert tensor_digest(tensor, kind=kind) != tensor_digest(flip_bit(tensor, bit), kind=kind)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 10**6), rows=st.integers(2, 12), columns=st.integers(2, 12))
@settings(max_examples=60, deadline=None)
def test_a_transposed_tensor_has_another_digest(kind, seed, rows, columns):
    tensor = torch.randn((rows, columns), generator=torch.Generator().manual_seed(seed))
    assert tensor_digest(tensor, kind=kind) != tensor_digest(tensor.T, kind=kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_two_exchanged_elements_change_the_digest_over_many_chunks(kind, dtype):
    tensor = random_tensor((600_001,), dtype, 3)
    choose = random.Random(0)
    before = tensor_digest(tensor, kind=kind)
    for _ in range(20):
        one, other = choose.sample(range(tensor.numel()), 2)
        if tensor[one] == tensor[other]:
            continue
        exchanged = tensor.clone()
        exchanged[one], exchanged[other] = tensor[other].clone(), tensor[one].clone()
        assert tensor_digest(exchanged, kind=kind) != before


@pytest.mark.parametrize("kind", KINDS)
def test_shape_and_dtype_are_part_of_the_digest(kind):
    zeros = torch.zeros(4, 6)
    others = [zeros.view(6, 4), zeros.view(24), zeros.to(torch.int32), zeros.to(torch.bfloat16), torch.zeros(4, 7)]
    assert len({tensor_digest(tensor, kind=kind) for tensor in [zeros, *others]}) == 1 + len(others)


def test_the_weighted_sum_equals_its_definition():
    tensor = torch.tensor([1, -2, 2**31 - 1, -(2**31)], dtype=torch.int32)
    mask = 2**64 - 1

    def noise(index: int) -> int:
        z = index * 0x9E3779B97F4A7C15 & mask
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return (z ^ (z >> 31)) | 1

    total = sum(int(word) * noise(position) for position, word in enumerate(tensor)) * noise(-1 & mask)
    assert tensor_digest(tensor, kind="wsum") == f"int32[4]:{total & mask:016x}"


@given(st.permutations(["a", "b", "c.weight", "c.bias"]))
def test_the_combined_digest_does_not_depend_on_the_order_of_names(order):
    digests = {name: tensor_digest(random_tensor((3,), torch.float32, len(name))) for name in sorted(order)}
    assert combine({name: digests[name] for name in order}) == combine(digests)


def test_names_are_part_of_the_combined_digest_and_two_swapped_tensors_change_it():
    one, other = "float32[1]:11", "float32[1]:22"
    combined = {
        combine({"a": one, "b": other}),
        combine({"a": other, "b": one}),
        combine({"a": one, "c": other}),
        combine({"a": one}),
        combine({"a": one, "b": other}, kind="wsum"),
    }
    assert len(combined) == 5


def test_a_mismatch_names_the_tensor_and_the_tensor_whose_content_it_has():
    lines = describe_differences({"a": "1", "b": "2", "c": "3"}, {"a": "2", "b": "2", "d": "9"})
    assert lines == [
        "a: 1 in the policy, 2 in the engine (which is the policy's b)",
        "c: 3 in the policy, absent in the engine",
        "d: absent in the policy, 9 in the engine",
    ]


def test_a_fingerprint_has_a_kind_and_other_kinds_are_rejected():
    assert kind_of(combine({}, kind="wsum")) == "wsum"
    with pytest.raises(WeightSyncError, match="md5"):
        kind_of("md5:123")


@pytest.mark.gpu
@pytest.mark.smoke
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_gpu_and_a_cpu_compute_the_same_weighted_sum(dtype):
    tensor = random_tensor((700_001, 3), dtype, 5)
    assert tensor_digest(tensor.cuda(), kind="wsum") == tensor_digest(tensor, kind="wsum")
