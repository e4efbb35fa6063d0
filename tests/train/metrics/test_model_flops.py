"""Model FLOP/s and MFU: the formula, the peaks of known GPUs, and the key that replaces them."""

import pytest

from rl_train.metrics.measured import ModelFlops, peak_tflops


def result(lengths, trained, skipped=0.0):
    return {"computed_lengths": lengths, "global_valid_toks": trained, "skipped_valid_toks": skipped}


def test_flops_are_six_per_trained_weight_and_token_and_twelve_per_attended_pair():
    sizes = {"trained": 5.0, "frozen": 7.0, "trained_head": 11.0, "attention": 3.0}
    pairs = 4 * 5 / 2 + 2 * 3 / 2
    expected = (6 * 5 + 4 * 7) * 6 + 6 * 11 * (4 - 1) + 12 * 3 * pairs
    assert ModelFlops(sizes, ranks=2, peak=None).tflop(result([4, 2], 4.0, skipped=1.0)) == pytest.approx(expected / 1e12)


def test_speed_is_per_rank_and_mfu_needs_a_peak():
    sizes, trained = {"trained": 1e9}, result([1000, 1000], 1000.0)
    assert ModelFlops(sizes, ranks=4, peak=None).metrics(trained, 2.0) == {"tflops_per_s": pytest.approx(1.5)}
    assert ModelFlops(sizes, ranks=4, peak=300.0).metrics(trained, 2.0)["mfu"] == pytest.approx(0.005)
    assert ModelFlops(sizes, ranks=4, peak=300.0).metrics({"loss": 0.0}, 2.0) == {}


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Tesla T4", None),
        (None, None),
    ],
)
def test_the_peak_is_that_of_the_gpu_in_bfloat16(name, peak):
    assert peak_tflops(name, "bfloat16") == peak
    assert peak_tflops(name, "float32") is None
