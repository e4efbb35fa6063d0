"""A whole run of `rlcore train` on ranks started by Ray; the plugin's registration."""

import json
import subprocess
import sys

import pytest
from e2e_runs import TINY, merged, metrics_of

pytestmark = pytest.mark.megatron


@pytest.mark.full(
    "test_ray_ranks.py compares steps and exported weights of two ranks; e2e/test_runs.py has the command over Ray"
)
@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_a_run_of_grpo_has_the_numbers_of_the_backend_on_transformers(rlcore, tmp_path):
    tiny = merged(TINY, {"grpo": {"max_num_steps": 2}, "checkpointing": {"save_period": 2}})
    changes = {
        "hf": {"cluster": {"backend": "in_process"}},
        "megatron": {
            "policy": {
                "backend": "megatron",
                "megatron_cfg": {"tensor_model_parallel_size": 2},
                "generation": {"num_workers": 1},
            },
            "cluster": {"workers_per_node": 2},
        },
    }
    steps = {}
    for name, change in changes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.yaml").write_text(json.dumps(merged(tiny, change)))
        code, output = rlcore("train", "run.yaml", folder=tmp_path / name)
        assert code == 0, output
        steps[name] = metrics_of(tmp_path / name)
    assert steps["hf"][2]["grad_norm"] > 1e-3
    skipped = ("refit/", "mismatch/", "step", "staleness")
    for step in (1, 2):
        expected, found = steps["hf"][step], steps["megatron"][step]
        assert step > 1 or found["refit/canary_error"] < 1e-5
        for key, value in expected.items():
            if not key.startswith(skipped):
                assert found[key] == pytest.approx(value, rel=1e-4, abs=1e-4), (step, key)


def test_the_plugin_is_listed_without_importing_torch():
    code = (
        "import sys; from rl_backends_megatron import plugin; from rl_backends_megatron.config import MegatronPolicyConfig; "
        "assert plugin.rlcore_policies()[0].name == 'megatron'; "
        "print(sorted({'torch', 'ray', 'numpy', 'transformers', 'megatron'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
