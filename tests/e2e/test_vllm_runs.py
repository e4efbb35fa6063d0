"""Whole runs with vLLM: their metrics and their config errors."""

import json
from pathlib import Path

import pytest
from e2e_runs import metrics_of

pytestmark = [pytest.mark.slow, pytest.mark.vllm]
EXAMPLES = Path(__file__).parents[2] / "examples"
VLLM = {"policy": {"generation": {"backend": "vllm", "vllm_cfg": {"max_num_seqs": 16}}}}


def test_a_run_on_vllm_trains_on_tokens_that_its_policy_would_have_sampled(train_here, tmp_path):
    # In this process; backends_vllm/test_replicas.py has vLLM over Ray.
    code, output = train_here({**VLLM, "cluster": {"backend": "in_process"}, "grpo": {"max_num_steps": 3}})
    assert code == 0, output
    steps = metrics_of(tmp_path)
    assert sorted(steps) == [1, 2, 3]
    for step, found in steps.items():
        # Both sides compute in float32; measured are 1e-6.
        assert found["mismatch/kl"] < 1e-6
        assert found["mismatch/max"] < 1e-4
        assert found["refit/canary_error"] < 1e-5
        assert found["refit/weight_version"] == (step - 1) * 2
        assert found["rollout/rows"] == 16.0
    rollouts = (tmp_path / "runs/run/rollouts/step_000003.jsonl").read_text().splitlines()
    assert [json.loads(row)["weight_version"] for row in rollouts] == [4] * 16


def test_the_example_with_pictures_trains_with_vllm_on_the_tokens_of_its_policy(rlcore, tmp_path):
    changes = ["policy.generation.backend=vllm", "grpo.max_num_steps=3", "grpo.val_at_start=false", "grpo.val_at_end=false"]
    more = ["grpo.num_prompts_per_step=8", "checkpointing.enabled=false", "data.check_rows=8"]
    code, output = rlcore("train", str(EXAMPLES / "grpo_pictures.yaml"), *changes, *more, folder=tmp_path)
    assert code == 0, output
    lines = (tmp_path / "runs" / "grpo_pictures" / "metrics.jsonl").read_text().splitlines()
    steps = [step for step in map(json.loads, lines) if step["step"]]
    for step in steps:
        # Both sides compute in float32; measured are 2e-6 at most.
        assert step["mismatch/kl"] < 1e-6
        assert step["mismatch/max"] < 1e-4
        assert step["refit/canary_error"] < 1e-5
    assert len(steps) == 3


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vllm_kwargs": {"block_sise": 32}}, "block_size"),
        ({"vllm_kwargs": {"dtype": "float32"}}, "vllm_cfg.precision"),
        ({"vllm_cfg": {"tensor_paralel_size": 2}}, "tensor_parallel_size"),
        ({"vllm_cfg": {"kv_cache_gib": 0}}, "more than 0.0"),
    ],
)
def test_a_wrong_section_for_vllm_ends_with_exit_code_2_before_anything_starts(train_here, changes, says):
    code, output = train_here({"policy": {"generation": {"backend": "vllm", **changes}}})
    assert code == 2, output
    assert says in output
    assert "run.yaml" in output
    assert "Traceback" not in output
