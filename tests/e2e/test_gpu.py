"""Whole runs on a GPU: the quickstart, and each engine with each policy on one device."""

import pytest
import torch
from e2e_runs import ROOT, TrainingProcess, metrics_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ON_GPU = {"cluster": {"use_gpus": True}}


def vllm(**vllm_cfg):
    cfg = {"max_num_seqs": 16, "gpu_memory_utilization": 0.3, "kv_cache_gib": 1.0, "enforce_eager": True, **vllm_cfg}
    return {"generation": {"backend": "vllm", "vllm_cfg": cfg}}


def test_the_quickstart_learns_on_a_gpu(tmp_path):
    config = {"defaults": str(ROOT / "examples" / "grpo_addition.yaml"), **ON_GPU}
    config["policy"] = {"model_name": str(ROOT / "examples" / "addition" / "model")}
    run = TrainingProcess(tmp_path, config, "grpo.max_num_steps=60")
    code, output = run.wait(timeout=900)
    assert code == 0, output
    found = metrics_of(tmp_path)
    # On a CPU, accuracy increases from 0.5 to more than 0.8 in 60 steps.
    assert found[60]["validation/accuracy"] > found[0]["validation/accuracy"] + 0.15
    run.assert_gone()


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param({"backend": "hf"}, id="hf-hf", marks=pytest.mark.smoke),
        pytest.param({"backend": "hf", **vllm()}, id="hf-vllm", marks=[pytest.mark.vllm, pytest.mark.smoke]),
        pytest.param({"backend": "hf", **vllm(sleep_level=1)}, id="hf-vllm-sleep-1", marks=pytest.mark.vllm),
        pytest.param({"backend": "hf", **vllm(sleep_level=2)}, id="hf-vllm-sleep-2", marks=pytest.mark.vllm),
        pytest.param(
            {"backend": "megatron", **vllm(sleep_level=1)}, id="megatron-vllm", marks=[pytest.mark.vllm, pytest.mark.megatron]
        ),
    ],
)
def test_a_policy_and_its_engine_share_one_gpu(train, tmp_path, policy):
    run = train({**ON_GPU, "grpo": {"max_num_steps": 3}, "policy": policy})
    code, output = run.wait(timeout=900)
    assert code == 0, output
    steps = metrics_of(tmp_path)
    assert sorted(steps) == [1, 2, 3]
    for step, found in steps.items():
        # Both sides compute in float32, one of them with TF32 in its attention.
        assert found["mismatch/kl"] < 1e-3
        assert found["refit/weight_version"] == (step - 1) * 2
    run.assert_gone()


@pytest.mark.smoke
def test_a_run_in_one_process_computes_on_the_gpu(train, tmp_path):
    code, output = train({"cluster": {"backend": "in_process"}, "grpo": {"max_num_steps": 2}}).wait()
    assert code == 0, output
    assert sorted(metrics_of(tmp_path)) == [1, 2]
